"""The kernels of a shared prefix to compile ahead of time: SM 9.0 alone, which alone shares prefixes.

Invariants: the arguments here are those `launch.py` launches with, for any group and pages of any size; head dimensions
are those of `attention.variants`, which calls `register_prefix`. Knows nothing of compiling.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker_kernels.attention.shared_prefix.config import SM, WIDE_QUERIES, tile_of
from stoker_kernels.attention.shared_prefix.triton_shared import CUT_PAGES, cut_prefix_kernel, shared_prefix_kernel
from stoker_kernels.attention.triton_tiles import UNPACK_CVT, UNPACK_PAIRS
from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_ANYWHERE, I32_DIVISIBLE, register_aot

if TYPE_CHECKING:
    from stoker_kernels.attention.variants import Form

_SHARED = {
    **dict.fromkeys(("values_ptr", "lse_ptr"), "*fp32"),
    **dict.fromkeys(("page_table_ptr", "own_lens_ptr", "shared_ptr"), "*i32"),
    "seq_slots_ptr": I32_ANYWHERE,
    "scale_log2": FP32,
    **dict.fromkeys(("num_rows", "num_kv_heads", "parts", "page_table_stride", "group", "page_shift"), I32),
    **dict.fromkeys(("q_stride", "stride_page", "stride_head"), I32_DIVISIBLE),
}


def _register(dtype: str, fp8: bool, form: Form) -> None:
    """Both tiles of one head dimension and cache."""
    kv_bytes = 1 if fp8 else 2
    cache = "*u16" if fp8 else f"*{dtype}"
    pointers = {"q_ptr": f"*{dtype}", "k_ptr": cache, "v_ptr": cache} | ({"k_scale_ptr": "*fp32"} if fp8 else {})
    tiles = dict.fromkeys(tile_of(rows, 1, form.dim, kv_bytes) for rows in (1, WIDE_QUERIES + 1))
    for tile, row in itertools.product(tiles, [I32_DIVISIBLE] if form.exact else [I32_DIVISIBLE, I32]):
        constants = {
            "BLOCK_M": tile.block_m,
            "BLOCK_D": form.dim // (2 if fp8 else 1),
            "BLOCK_N": tile.block_n,
            "STAGES": tile.stages,
            "EXACT": form.exact,
            "WHOLE": form.whole,
            "FP8": fp8,
            "PRECISION": "tf32",
            "UNPACK": (UNPACK_CVT if tile.cvt else UNPACK_PAIRS).value if fp8 else 0,
        } | ({} if fp8 else {"k_scale_ptr": None})
        register_aot(
            shared_prefix_kernel,
            {**pointers, **_SHARED, "head_dim": row, "stride_token": row},
            [constants],
            options={"num_warps": tile.num_warps},
            min_sm=SM,
            max_sm=SM,
            compact=form.dim == 128 and form.exact and form.whole and dtype == BF16,
        )


def register_prefix(forms: Sequence[Form]) -> None:
    """All of them: the kernel of a step, and those of layers in these forms, in 16 bits and e4m3."""
    register_aot(
        cut_prefix_kernel,
        dict.fromkeys(("page_table_ptr", "seq_lens_ptr", "shared_ptr", "own_table_ptr", "own_lens_ptr"), "*i32")
        | {"seq_slots_ptr": I32_ANYWHERE}
        | dict.fromkeys(("table_stride", "own_stride", "page_shift"), I32),
        [{"BLOCK": CUT_PAGES}],
        options={"num_warps": 4},
        min_sm=SM,
        max_sm=SM,
    )
    for dtype, fp8, form in itertools.product((FP16, BF16), (False, True), forms):
        _register(dtype, fp8, form)
