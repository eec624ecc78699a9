"""What of the kernel of images is compiled ahead of time, for each SM: what Gemma 3's models launch, and a tile for any
other head dimension.

Heads of 128 (27B) and 256 (4B, 12B), in the chip's 16-bit type, with a cache of that or of e4m3; group and page size
are arguments. Soft-caps, groups of more heads than a tile has rows and other types are compiled when a model that has
them starts.
Invariants: the arguments here are those `launch.py` launches with. Knows nothing of compiling.
"""

from __future__ import annotations

import itertools

from stoker_kernels.image_attention.tiles import EXACT_DIMS, TILE_DIMS, tile_for
from stoker_kernels.image_attention.triton_image import image_kernel
from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_ANYWHERE, I32_DIVISIBLE, SMS, register_aot
from stoker_kernels.launch.triton_tile import UNPACK_CVT, UNPACK_PAIRS

_SPANS = dict.fromkeys(("slots_ptr", "rows_ptr", "counts_ptr", "begins_ptr", "ends_ptr"), I32_ANYWHERE)
_NUMBERS = {
    **dict.fromkeys(("scale_log2", "softcap"), FP32),
    **dict.fromkeys(("window", "num_kv_heads", "tiles", "page_table_stride", "group", "page_shift"), I32),
    **dict.fromkeys(("q_stride", "out_stride", "stride_page", "stride_head"), I32_DIVISIBLE),
}


def _register(sm: int, fp8: bool, dim: int, exact: bool, whole: bool, window: bool, row: str = I32_DIVISIBLE) -> None:
    """One kernel; `row` is the type of a head's size, in values and as the cache has it."""
    dtype = FP16 if sm < 80 else BF16
    tile = tile_for(dim, 1 if fp8 else 2, sm)
    cache = "*u16" if fp8 else f"*{dtype}"
    pointers = {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "k_ptr": cache, "v_ptr": cache, "page_table_ptr": "*i32"}
    scales = ("k_scale_ptr", "v_scale_ptr")
    constants = {
        "BLOCK_M": tile.block_m,
        "BLOCK_D": dim // (2 if fp8 else 1),
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "EXACT": exact,
        "WHOLE": whole,
        "FP8": fp8,
        "WINDOW": window,
        "SOFTCAP": False,
        "PRECISION": "tf32",
        "UNPACK": (UNPACK_CVT if tile.cvt else UNPACK_PAIRS).value if fp8 else 0,
    }
    register_aot(
        image_kernel,
        {
            **pointers,
            **_SPANS,
            **_NUMBERS,
            **dict.fromkeys(("head_dim", "stride_token"), row),
            **(dict.fromkeys(scales, f"*{FP32}:1") if fp8 else {}),
        },
        [constants if fp8 else constants | dict.fromkeys(scales)],
        options={"num_warps": tile.num_warps},
        min_sm=sm,
        max_sm=sm,
        compact=sm == 90 and dim == 256 and whole and window,
    )


for _sm, _fp8 in itertools.product(SMS, (False, True)):
    for _dim, _whole, _window in itertools.product(EXACT_DIMS, (True, False), (True, False)):
        _register(_sm, _fp8, _dim, exact=True, whole=_whole, window=_window)
    for _dim, _row in itertools.product(TILE_DIMS, (I32_DIVISIBLE, I32)):
        _register(_sm, _fp8, _dim, exact=False, whole=False, window=True, row=_row)
