"""Products with weights in floats of four bits, NVFP4 and MXFP4, and activations of 16: `fp4_linear`.

Weights in fragments are multiplied by the Hopper kernels of `fragment_gemm`; `store.py` lays rows out, `triton_fp4.py`
takes every other weight and GPU, `choose.py` says when it multiplies and when it only dequantizes, `reference.py` is
the oracle and the CPU's. With the activation behind gate and up: `gemm.linear_silu_mul`.
Must never know: files and formats, models. A new form of scales: here, and in `quant/fp4_weight.py`.
"""

from stoker_kernels.fp4_gemm.choose import scratch
from stoker_kernels.fp4_gemm.op import best_layout, fp4_linear
from stoker_kernels.fp4_gemm.reference import dequantize_fp4
from stoker_kernels.fp4_gemm.store import store_fp4

__all__ = ["best_layout", "dequantize_fp4", "fp4_linear", "scratch", "store_fp4"]
