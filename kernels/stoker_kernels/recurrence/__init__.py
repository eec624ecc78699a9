"""Layers with a state for each sequence in place of a cache of its tokens: short convolution, Mamba-2, delta rule.

`op.py` has the public functions, `types.py` what a step's rows are, `triton_*.py` the kernels, `reference.py` the
oracle. States rest by slot; a row that begins at position 0 begins with a state of zeros.
Must never know: which model has such layers. A new recurrence: a function in `op.py`, `reference.py` and a
`triton_*.py`, what is compiled ahead in `variants.py`.
"""

from stoker_kernels.recurrence.op import causal_conv, gated_delta_rule, mamba2_scan, scratch_values
from stoker_kernels.recurrence.types import RecurrentRows

__all__ = ["RecurrentRows", "causal_conv", "gated_delta_rule", "mamba2_scan", "scratch_values"]
