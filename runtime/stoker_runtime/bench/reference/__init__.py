"""The model once more, as plainly as PyTorch can say it: the oracle that a benchmark checks its own tokens against.

`model` runs the layers; `latent`, `mixture`, `rotary` and `weights` are parts of it. A new kind of layer, of rotary
scaling or of weight has its meaning written here anew.
Must never know: a table, packing, rounding or kernel of the engine; only specs and the types of weights are shared.
"""
