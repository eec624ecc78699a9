"""Parts of a model's spec: how it rotates, what its latent attention is made of.

Plain data, free of torch; `spec.py` is made of them.
Must never know: configurations and checkpoints, of which they are read; how anything is computed. A new part: a module
here, a field of `spec.py`.
"""
