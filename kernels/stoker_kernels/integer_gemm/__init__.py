"""Products with weights in integers of 4 or 8 bits: `integer_linear`.

`fragments.py` is the order of four-bit codes that the Hopper kernels read (`sm90_int4.py`, csrc/), `store.py` lays rows
out, `triton_integer.py` takes every other weight and GPU, `reference.py` is the oracle, `bench.py` checks and times.
Where batch invariance is demanded `fixed.py` cuts K in one way, and `rows.py` is the CPU's. With the activation behind
gate and up: `gemm.linear_silu_mul`.
Must never know: files and formats, models. A new width or layout: here, and in `quant/integer_weight.py`.
"""

from stoker_kernels.integer_gemm.choose import kernels_refusal, scratch, silu_mul_pairs
from stoker_kernels.integer_gemm.fragments import fills_blocks, from_fragments, to_fragments
from stoker_kernels.integer_gemm.op import best_layout, integer_linear
from stoker_kernels.integer_gemm.reference import dequantize_integers
from stoker_kernels.integer_gemm.store import store_integers

__all__ = [
    "best_layout",
    "dequantize_integers",
    "fills_blocks",
    "from_fragments",
    "integer_linear",
    "kernels_refusal",
    "scratch",
    "silu_mul_pairs",
    "store_integers",
    "to_fragments",
]
