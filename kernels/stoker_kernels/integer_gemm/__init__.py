"""Products with weights in integers of 4 or 8 bits: `integer_linear`.

Weights in fragments are multiplied by the Hopper kernels of `fragment_gemm`; `store.py` lays rows out,
`triton_integer.py` takes every other weight and GPU, `reference.py` is the oracle, `bench.py` checks and times.
Where batch invariance is demanded `fixed.py` cuts K in one way, and `rows.py` is the CPU's. With the activation behind
gate and up: `gemm.linear_silu_mul`.
Must never know: files and formats, models. A new width: here, and in `quant/integer_weight.py`.
"""

from stoker_kernels.integer_gemm.choose import scratch
from stoker_kernels.integer_gemm.op import best_layout, integer_linear
from stoker_kernels.integer_gemm.reference import dequantize_integers
from stoker_kernels.integer_gemm.store import store_integers

__all__ = [
    "best_layout",
    "dequantize_integers",
    "integer_linear",
    "scratch",
    "store_integers",
]
