"""RMS norm (plain, with the residual, with FP8 quantization, of columns, beside a gate, in parts) and layer norm.

Must never know: where in a layer it stands. A new norm: a function in `op.py`, `reference.py` and a `triton_*.py`.
"""

from stoker_kernels.norm.gated import gated_rms_norm
from stoker_kernels.norm.layer_norm import add_layer_norm, layer_norm
from stoker_kernels.norm.op import (
    add_normed,
    add_rms_norm,
    add_rms_norm_quant,
    rms_norm,
    rms_norm_columns,
    rms_norm_quant,
)
from stoker_kernels.norm.parted import mean_squares, rms_norm_by

__all__ = [
    "add_layer_norm",
    "add_normed",
    "add_rms_norm",
    "add_rms_norm_quant",
    "gated_rms_norm",
    "layer_norm",
    "mean_squares",
    "rms_norm",
    "rms_norm_by",
    "rms_norm_columns",
    "rms_norm_quant",
]
