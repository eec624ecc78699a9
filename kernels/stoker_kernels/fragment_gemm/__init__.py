"""Products with weights of few bits by kernels of our own on Hopper, whatever the numbers: integers of 4 and 8 bits,
floats of 4.

`order.py` is the order of codes that the kernels read, `tiles.py` what is compiled of csrc/ and which kernel takes a
product, `sm90.py` their host side, `product.py` what all their ops have in common. The ops `integer_gemm` and
`fp4_gemm` say when they run and what runs elsewhere.
Must never know: files and formats, models. A new form of numbers: a header in csrc/, an order, a line of `tiles.py`.
"""

from stoker_kernels.fragment_gemm.order import CodeForm, fills_blocks, from_fragments, halves, store_half, to_fragments
from stoker_kernels.fragment_gemm.product import by_dense, multiplied
from stoker_kernels.fragment_gemm.sm90 import (
    choice,
    dense,
    dequantize,
    fragments_refusal,
    kernels_refusal,
    multiply,
    multiply_invariant,
    numbers_of,
    refusal,
    silu_mul_pairs,
    takes_tokens,
)
from stoker_kernels.fragment_gemm.tiles import NUMBERS, Numbers, Tile

__all__ = [
    "NUMBERS",
    "CodeForm",
    "Numbers",
    "Tile",
    "by_dense",
    "choice",
    "dense",
    "dequantize",
    "fills_blocks",
    "fragments_refusal",
    "from_fragments",
    "halves",
    "kernels_refusal",
    "multiplied",
    "multiply",
    "multiply_invariant",
    "numbers_of",
    "refusal",
    "silu_mul_pairs",
    "store_half",
    "takes_tokens",
    "to_fragments",
]
