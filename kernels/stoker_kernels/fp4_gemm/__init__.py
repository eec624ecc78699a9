"""Products with weights in floats of four bits, NVFP4 and MXFP4, and activations of 16: `fp4_linear`.

`triton_fp4.py` takes every GPU and shape, `choose.py` says when it multiplies and when it only dequantizes,
`reference.py` is the oracle and the CPU's.
Must never know: files and formats, models. A new form of scales: here, and in `quant/fp4_weight.py`.
"""

from stoker_kernels.fp4_gemm.op import fp4_linear
from stoker_kernels.fp4_gemm.reference import dequantize_fp4

__all__ = ["dequantize_fp4", "fp4_linear"]
