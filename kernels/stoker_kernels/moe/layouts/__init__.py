"""How experts of few bits rest: the orders of codes and scales that the kernels of `moe` read, a file each kind.

Must never know: how they are multiplied, layers, checkpoints. A new kind: a file here, and a field of `types.py`.
"""
