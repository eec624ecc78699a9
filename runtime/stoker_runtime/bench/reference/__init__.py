"""The model once more, as plainly as PyTorch can say it: the oracle that a benchmark checks its own tokens against.

`model` runs the layers; `latent`, `mixture`, `rotary` and `weights` are parts of it. A new layer kind, rotary scaling or
kind of weight has its meaning written here anew.
Never: a table, packing, rounding or kernel of the engine; only specs and the types of weights are shared.
"""
