"""The latent kernels to compile ahead of time, for each SM: ranks and parts of heads of published models.

DeepSeek V2 and V3 have latents of 512 and 64, heads of 128; GLM-4.7-Flash the same latents, heads of 192 with values of
256; MiniCPM 3 latents of 256 and 32, heads of 64. Numbers of heads and pages are arguments, but for the tiles that
follow from them. Anything else is compiled when its model starts.
Invariants: the arguments here are those `triton_launch.py`, `sm90_latent.py` and `triton_write.py` launch with.
Knows nothing of compiling.
"""

from __future__ import annotations

from typing import Any

from stoker_kernels.latent_attention.sm90_latent import BLOCK_PARTS
from stoker_kernels.latent_attention.tiles import Tile, absorbed_tile, widened_tile
from stoker_kernels.latent_attention.triton_absorbed import latent_context_kernel, latent_decode_kernel
from stoker_kernels.latent_attention.triton_plan import latent_plan_kernel
from stoker_kernels.latent_attention.triton_widened import latent_prefill_kernel
from stoker_kernels.latent_attention.triton_write import TOKENS, WARPS, latent_rope_write_kernel
from stoker_kernels.launch.aot_registry import (
    BF16,
    FP16,
    FP32,
    I32,
    I32_ANYWHERE,
    I32_DIVISIBLE,
    I64,
    SMS,
    register_aot,
)

# (rank, rotated, blocks of heads without it and of values, whether neighbours turn together)
PUBLISHED = ((512, 64, (128, 256), True), (256, 32, (64,), False))
HEADS = (16, 20, 128)  # which fill the least tile, one between and the largest
PLAN_ROWS = tuple(16 << i for i in range(7))
BYTES = "u8"  # of e4m3
_LEAST_SM = 80
_SIZES = dict.fromkeys(("q_stride", "head_dim", "rank", "rotated"), I32_DIVISIBLE)
_PAGES = {"page_table_stride": I32, "stride_page": I32_DIVISIBLE, "page_shift": I32}
_ROWS = dict.fromkeys(("query_start_ptr", "seq_lens_ptr"), I32_ANYWHERE)
_COUNTS = dict.fromkeys(("heads", "num_rows", "num_tokens", "first_token"), I32)


def _pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")


def _scaled(types: dict[str, str], name: str, cache: str) -> tuple[dict[str, str], dict[str, Any]]:
    """`types` with that of a cache's scale, or what says that there is none."""
    return (types | {name: f"*{FP32}"}, {}) if cache == BYTES else (types, {name: None})


def _absorbed(tile: Tile, rank: int, rotated: int, whole: bool) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_R": rank,
        "BLOCK_P": rotated,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "WHOLE": whole,
        "PRECISION": "tf32",
    }


def _register_absorbed(dtype: str, cache: str, sm: int, rank: int, rotated: int) -> None:
    """What reads pages, for one model's sizes, whose cache is of its own type or bytes of e4m3."""
    data = {**_pointers(dtype, "q_latent_ptr", "q_ptr", "out_ptr"), "cache_ptr": f"*{cache}"}
    data, unscaled = _scaled(data, "cache_scale_ptr", cache)
    sums = _pointers(FP32, "partial_ptr", "partial_lse_ptr")
    plan = _pointers(I32, "page_table_ptr", "items_ptr", "num_items_ptr", "arrivals_ptr")
    compact = dtype == cache == BF16 and sm == 90
    tiles = {absorbed_tile(heads, rank, 2, sm) for heads in HEADS}
    for tile in sorted(tiles, key=lambda each: each.block_m):
        register_aot(
            latent_decode_kernel,
            {**data, **sums, **plan, **_SIZES, **_PAGES, "scale_log2": FP32, "head_tiles": I32, "heads": I32},
            [_absorbed(tile, rank, rotated, whole) | unscaled for whole in (True, False)],
            options={"num_warps": tile.num_warps},
            min_sm=sm,
            max_sm=sm,
            compact=compact,
        )
    tile = absorbed_tile(max(HEADS), rank, 2, sm)
    rows = {**_ROWS, "seq_slots_ptr": I32_ANYWHERE, **_COUNTS, "group": I32, "groups": I32}
    register_aot(
        latent_context_kernel,
        {**data, "lse_ptr": f"*{FP32}", "page_table_ptr": f"*{I32}", **rows, **_SIZES, **_PAGES, "scale_log2": FP32},
        [_absorbed(tile, rank, rotated, whole) | unscaled for whole in (True, False)],
        options={"num_warps": tile.num_warps},
        min_sm=sm,
        max_sm=sm,
        compact=compact,
    )


def _register_widened(dtype: str, sm: int, rotated: int, head: int) -> None:
    """What reads chunks, for one size of heads."""
    wide = widened_tile(2, sm, head)
    blocks = {"BLOCK_M": wide.block_m, "BLOCK_D": head, "BLOCK_P": rotated, "BLOCK_V": head, "BLOCK_N": wide.block_n}
    register_aot(
        latent_prefill_kernel,
        {
            **_pointers(dtype, "q_ptr", "widened_ptr", "own_ptr", "out_ptr"),
            "lse_ptr": f"*{FP32}", "scale_log2": FP32, "value_dim": I32_DIVISIBLE,
            **_ROWS, **_COUNTS, **_SIZES,
        },
        [{**blocks, "STAGES": wide.stages, "PRECISION": "tf32"}],
        options={"num_warps": wide.num_warps},
        min_sm=sm,
        max_sm=sm,
        compact=dtype == BF16 and sm == 90,
    )


def _register_write(dtype: str, cache: str, rank: int, rotated: int, interleaved: bool) -> None:
    strides = dict.fromkeys(("latents_stride", "page_stride"), I32_DIVISIBLE)
    data = {**_pointers(dtype, "q", "latents", "own", "norm"), "cache": f"*{cache}"}
    data, unscaled = _scaled(data, "cache_scale", cache)
    register_aot(
        latent_rope_write_kernel,
        {
            **data,
            "positions": f"*{I32}", "slot_mapping": f"*{I64}", "cos_sin": f"*{FP32}", "eps": FP32,
            **_SIZES, **strides, "tokens": I32, "heads": I32, "page_shift": I32,
        },
        [{"BLOCK_R": rank, "HALF": rotated // 2, "INTERLEAVED": interleaved, "TOKENS": TOKENS} | unscaled],
        options={"num_warps": WARPS},
        min_sm=_LEAST_SM,
        compact=dtype == cache == BF16 and interleaved,
    )


for _rows in PLAN_ROWS:
    register_aot(
        latent_plan_kernel,
        {**_pointers(I32, "seq_lens_ptr", "seq_slots_ptr", "items_ptr", "parts_ptr"),
         **dict.fromkeys(("num_rows", "num_parts", "min_tiles"), I32)},
        [{"BLOCK_ROWS": _rows, "BLOCK_PARTS": BLOCK_PARTS}],
        options={"num_warps": 4},
        min_sm=90,
        max_sm=90,
        compact=_rows == 256,
    )  # fmt: skip
for _dtype in (BF16, FP16):
    for _rank, _rotated, _heads, _interleaved in PUBLISHED:
        for _cache in (_dtype, BYTES):
            _register_write(_dtype, _cache, _rank, _rotated, _interleaved)
        for _sm in SMS:
            if _sm >= _LEAST_SM:
                for _cache in (_dtype, BYTES):
                    _register_absorbed(_dtype, _cache, _sm, _rank, _rotated)
                for _head in _heads:
                    _register_widened(_dtype, _sm, _rotated, _head)
