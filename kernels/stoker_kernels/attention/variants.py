"""The attention kernels to compile ahead of time: for each SM its configuration, for each served head shape.

Invariants: the arguments here are those `triton_launch.py` launches with; one that is left out is compiled at its
first use. Knows nothing of compiling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from stoker_kernels.attention.config import DecodeConfig, PrefillConfig, decode_configs, prefill_configs
from stoker_kernels.attention.meta import MAX_SHARES
from stoker_kernels.attention.share_plan import share_plan_kernel
from stoker_kernels.attention.tile_plan import PLANNED_TILES, ROWS, tile_plan_kernel
from stoker_kernels.attention.triton_decode import decode_kernel, decode_plan_kernel
from stoker_kernels.attention.triton_prefill import prefill_kernel
from stoker_kernels.attention.triton_tiles import UNPACK_CVT, UNPACK_PAIRS
from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_ANYWHERE, I32_DIVISIBLE, SMS, register_aot
from stoker_kernels.launch.triton_tile import padded_dim

PAGE = 64
# (query heads per KV head, head dimension): Qwen2.5 7B, 1.5B; Llama 8B; Qwen3 0.6B; SmolLM2; Qwen3 8 per group; MHA.
HEADS = ((7, 128), (6, 128), (4, 128), (2, 128), (3, 64), (8, 128), (1, 128))
COMPACT_HEADS = (7, 128)
PLAN_ROWS = tuple(16 << i for i in range(7))

_CACHE_STRIDES = {"stride_page": I32_DIVISIBLE, "stride_head": I32_DIVISIBLE, "stride_token": I32_DIVISIBLE}
_COMMON = {
    "page_table_ptr": "*i32",
    "scale_log2": FP32,
    "softcap": FP32,
    "window": I32,
    "num_kv_heads": I32,
    "q_stride": I32_DIVISIBLE,
    "out_stride": I32_DIVISIBLE,
    "page_table_stride": I32,
    **_CACHE_STRIDES,
}
_DECODE = {
    "items_ptr": "*i32",
    "num_items_ptr": "*i32",
    "partial_ptr": "*fp32",
    "partial_lse_ptr": "*fp32",
    "arrivals_ptr": "*i32",
}
_PREFILL = {
    "seq_slots_ptr": I32_ANYWHERE,
    "query_start_ptr": I32_ANYWHERE,
    "seq_lens_ptr": I32_ANYWHERE,
    "num_rows": I32,
    "num_tokens": I32,
    "first_token": I32,
}


def _signature(dtype: str, fp8: bool, own: Mapping[str, str]) -> dict[str, str]:
    cache = "*u16" if fp8 else f"*{dtype}"
    pointers = {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "k_ptr": cache, "v_ptr": cache}
    scales = {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"} if fp8 else {}
    return {**pointers, **scales, **_COMMON, **own}


def _constants(group: int, dim: int, fp8: bool, block_m: int, config: DecodeConfig | PrefillConfig) -> dict[str, Any]:
    constants: dict[str, Any] = {
        "sinks_ptr": None,
        "GROUP": group,
        "BLOCK_M": block_m,
        "HEAD_DIM": dim,
        "BLOCK_D": padded_dim(dim) // (2 if fp8 else 1),
        "PAGE": PAGE,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "FP8": fp8,
        "WINDOW": False,
        "SOFTCAP": False,
        "SINKS": False,
        "PRECISION": "tf32",
        "UNPACK": (UNPACK_CVT if config.cvt else UNPACK_PAIRS).value if fp8 else 0,
    }
    return constants if fp8 else constants | {"k_scale_ptr": None, "v_scale_ptr": None}


def _register(sm: int, dtype: str, fp8: bool, group: int, dim: int) -> None:
    compact = (group, dim) == COMPACT_HEADS and dtype == (FP16 if sm < 80 else BF16)
    packed = max(16, triton.next_power_of_2(group))
    tiles = {(c.block_n, c.num_warps, c.stages, c.cvt): c for c in decode_configs(dim, 1 if fp8 else 2, sm)}
    for decode in tiles.values():
        register_aot(
            decode_kernel,
            _signature(dtype, fp8, _DECODE),
            [_constants(group, dim, fp8, packed, decode)],
            options={"num_warps": decode.num_warps},
            min_sm=sm,
            max_sm=sm,
            compact=compact,
        )
    for prefill in prefill_configs(dim, 1 if fp8 else 2, sm):
        register_aot(
            prefill_kernel,
            _signature(dtype, fp8, _PREFILL),
            [_constants(group, dim, fp8, max(prefill.block_m, packed), prefill)],
            options={"num_warps": prefill.num_warps},
            min_sm=sm,
            max_sm=sm,
            compact=compact and (sm in (75, 80, 90) or not fp8),
        )


def _register_plan(rows: int) -> None:
    pointers = dict.fromkeys(("seq_lens_ptr", "seq_slots_ptr", "items_ptr", "num_items_ptr"), "*i32")
    numbers = dict.fromkeys(("num_rows", "window", "capacity", "target_items"), I32)
    splits = sorted(
        {(c.min_split, c.max_split) for sm in SMS for d in (64, 128) for b in (1, 2) for c in decode_configs(d, b, sm)}
    )
    register_aot(
        decode_plan_kernel,
        pointers | numbers,
        [{"MIN_SPLIT": least, "MAX_SPLIT": most, "BLOCK_ROWS": rows} for least, most in splits],
        options={"num_warps": 4},
        compact=rows == 256,
    )
    register_aot(
        share_plan_kernel,
        dict.fromkeys(("seq_lens_ptr", "seq_slots_ptr", "shares_ptr"), "*i32")
        | dict.fromkeys(("num_rows", "num_kv_heads", "window"), I32)
        | dict.fromkeys(("num_ctas", "num_shares", "min_units", "tail_from"), I32),
        [{"BLOCK_ROWS": rows, "BLOCK_CTAS": triton.next_power_of_2(MAX_SHARES)}],
        options={"num_warps": 4},
        min_sm=90,
        max_sm=90,
        compact=rows == 256,
    )


register_aot(
    tile_plan_kernel,
    dict.fromkeys(("query_start_ptr", "seq_lens_ptr", "seq_slots_ptr"), I32_ANYWHERE)
    | dict.fromkeys(("tiles_ptr", "num_tiles_ptr"), "*i32")
    | dict.fromkeys(("num_rows", "num_tokens", "tile_tokens"), I32),
    [{"TILES": PLANNED_TILES, "BLOCK_ROWS": ROWS}],
    options={"num_warps": 4},
    min_sm=90,
    max_sm=90,
    compact=True,
)
for _rows in PLAN_ROWS:
    _register_plan(_rows)
for _sm in SMS:
    for _dtype in (FP16,) if _sm < 80 else (FP16, BF16):
        for _fp8 in (False, True):
            for _group, _dim in HEADS:
                _register(_sm, _dtype, _fp8, _group, _dim)
