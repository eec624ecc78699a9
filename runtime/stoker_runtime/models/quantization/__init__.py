"""How a checkpoint's linears are quantized already, as its configuration says: what is read, checked and refused.

`quantized_checkpoint.py` knows the methods; a family of number formats has a module for its settings
(`fp8_checkpoint.py`, `int8_checkpoint.py`, `integer_checkpoint.py`, `fp4_checkpoint.py`) and, where its weights lie in
several tensors, one for what they take of memory (`integer_scheme.py`, `fp4_scheme.py`). Of layers in several schemes
`mixed_settings.py` reads which has which, and `mixed_checkpoint.py` knows it.
Must never know: tensors, files of weights, kernels.
"""
