"""RMS norm (plain, with the residual, with FP8 quantization) and layer norm.

Must never know: where in a layer it stands. A new norm: a function in `op.py`, `reference.py` and a `triton_*.py`.
"""

from stoker_kernels.norm.layer_norm import layer_norm
from stoker_kernels.norm.op import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant

__all__ = ["add_rms_norm", "add_rms_norm_quant", "layer_norm", "rms_norm", "rms_norm_quant"]
