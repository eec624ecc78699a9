"""What a fetch tells the operator of a model, for its fit check: sizes that need no tensor to be read.

`shape.py` is what is asked; `weights.py` counts weights as the engine does. Must never know: GPUs, and what is decided.
"""
