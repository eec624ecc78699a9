"""Layers with a state for each sequence in place of a cache of its tokens: short convolution, Mamba-2, delta rule.

`op.py` has the public functions, `types.py` what a step's rows are, `triton_*.py` the kernels, `reference.py` the
oracle. States rest by slot; a row that begins at position 0 begins with a state of zeros. Tokens that may be taken back
are tried first and settled once it is known which of them count: `try_*`, `settle_*`.
Must never know: which model has such layers. A new recurrence: a function in `op.py`, `reference.py` and a
`triton_*.py`, what is compiled ahead in `variants.py`.
"""

from stoker_kernels.recurrence.op import (
    causal_conv,
    gated_delta_rule,
    mamba2_scan,
    scratch_values,
    settle_conv,
    settle_delta_rule,
    settle_mamba2,
    try_conv,
    try_delta_rule,
    try_mamba2,
)
from stoker_kernels.recurrence.types import DraftRows, RecurrentRows, Tried

__all__ = [
    "DraftRows",
    "RecurrentRows",
    "Tried",
    "causal_conv",
    "gated_delta_rule",
    "mamba2_scan",
    "scratch_values",
    "settle_conv",
    "settle_delta_rule",
    "settle_mamba2",
    "try_conv",
    "try_delta_rule",
    "try_mamba2",
]
