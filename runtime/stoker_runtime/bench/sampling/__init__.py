"""What sampling costs: rounds of each way to choose tokens beside greedy ones, and whether what was chosen may be.

`mode.py` measures and prints, `check.py` compares with the reference. A new way: an entry of `ways`, and if it filters
or changes logits, its meaning in `check.py`. Knows nothing of how kernels sample.
"""
