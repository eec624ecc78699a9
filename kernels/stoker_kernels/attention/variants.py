"""The attention kernels to compile ahead of time, for each SM: what a served model can launch, by rule and by no list.

A head dimension of 64, 128 or 256 has kernels of its own, any other runs in the tile above it; group and page size are
arguments. What nearly all models are, heads of 64 or 128, up to eight a KV head, pages of 64, no window, has kernels of
which group and page are constants, with every tuned tile; for all else there is one tile.
Batch-invariant attention, in bf16 on SM 9.0, has one tile for each of the three.
Soft-caps have kernels for heads of 128 and 256 in bf16, slopes for 64 and 128, patterns of blocks for 128, which is
where published models have them. Rows whose first keys other kernels attend (`shared_prefix`) have kernels on SM 9.0.
Invariants: the arguments here are those `triton_launch.py` launches with; what is left out, others of these, sinks and
groups above GROUP_TILE, is compiled when a model that has it starts.
Knows nothing of compiling.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton

from stoker_kernels.attention.config import (
    SHORT_CHUNK,
    DecodeConfig,
    PrefillConfig,
    decode_configs,
    prefill_config,
    prefill_configs,
    rare_decode_config,
)
from stoker_kernels.attention.fixed import SPLIT, fixed_config
from stoker_kernels.attention.meta import MAX_SHARES
from stoker_kernels.attention.share_plan import share_plan_kernel
from stoker_kernels.attention.shared_prefix.variants import register_prefix
from stoker_kernels.attention.tile_plan import PLANNED_TILES, ROWS, tile_plan_kernel
from stoker_kernels.attention.triton_decode import decode_kernel, decode_plan_kernel
from stoker_kernels.attention.triton_fixed import fixed_kernel, fixed_plan_kernel
from stoker_kernels.attention.triton_launch import EXACT_DIMS, TUNED_DIMS, TUNED_GROUPS, TUNED_PAGE
from stoker_kernels.attention.triton_prefill import prefill_kernel
from stoker_kernels.attention.triton_tiles import UNPACK_CVT, UNPACK_PAIRS
from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_ANYWHERE, I32_DIVISIBLE, SMS, register_aot

# Query heads a KV head of a decode tile: all published models have fewer.
GROUP_TILE = 16
PLAN_ROWS = tuple(16 << i for i in range(7))

_COMMON = {
    "page_table_ptr": "*i32",
    "scale_log2": FP32,
    "softcap": FP32,
    "window": I32,
    "num_kv_heads": I32,
    "q_stride": I32_DIVISIBLE,
    "out_stride": I32_DIVISIBLE,
    "page_table_stride": I32,
    "group": I32,
    "page_shift": I32,
    **dict.fromkeys(("block_shift", "local_blocks", "block_stride", "head_step", "first_head"), I32),
    "stride_page": I32_DIVISIBLE,
    "stride_head": I32_DIVISIBLE,
}
_DECODE = {
    "items_ptr": "*i32",
    "num_items_ptr": "*i32",
    "partial_ptr": "*fp32",
    "partial_lse_ptr": "*fp32",
    "arrivals_ptr": "*i32",
    "parts": I32,
    "before_stride": I32,
}
_BEFORE = dict.fromkeys(("before_ptr", "before_lse_ptr"), "*fp32")
_PREFILL = {
    "seq_slots_ptr": I32_ANYWHERE,
    "query_start_ptr": I32_ANYWHERE,
    "seq_lens_ptr": I32_ANYWHERE,
    "num_rows": I32,
    "num_tokens": I32,
    "first_token": I32,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Types of a launch: queries of `dtype`, a cache of the same or of e4m3."""

    dtype: str
    fp8: bool

    @property
    def kv_bytes(self) -> int:
        """Of a cached element."""
        return 1 if self.fp8 else 4 if self.dtype == FP32 else 2

    def signature(self, own: Mapping[str, str], row: str, form: Form) -> dict[str, str]:
        """The arguments of a kernel; `own` are those that the other does not have, `row` the type of a head's size."""
        cache = "*u16" if self.fp8 else f"*{self.dtype}"
        pointers = {"q_ptr": f"*{self.dtype}", "out_ptr": f"*{self.dtype}", "k_ptr": cache, "v_ptr": cache}
        scales = {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"} if self.fp8 else {}
        slopes = {"slopes_ptr": "*fp32"} if form.slopes else {}
        return {**pointers, **scales, **slopes, **_COMMON, "head_dim": row, "stride_token": row, **own}

    def constants(self, form: Form, block_m: int, config: DecodeConfig | PrefillConfig) -> dict[str, Any]:
        """The constants of a kernel."""
        constants: dict[str, Any] = {
            "sinks_ptr": None,
            "BLOCK_M": block_m,
            "BLOCK_D": form.dim // (2 if self.fp8 else 1),
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
            "GROUP": form.group,
            "PAGE_SHIFT": TUNED_PAGE.bit_length() - 1 if form.group else 0,
            "EXACT": form.exact,
            "WHOLE": form.whole,
            "FP8": self.fp8,
            "WINDOW": form.window,
            "SOFTCAP": form.softcap,
            "SINKS": False,
            "SLOPES": form.slopes,
            "PATTERN": form.pattern,
            "PRECISION": "ieee" if self.dtype == FP32 else "tf32",
            "UNPACK": (UNPACK_CVT if config.cvt else UNPACK_PAIRS).value if self.fp8 else 0,
        }
        absent = () if self.fp8 else ("k_scale_ptr", "v_scale_ptr")
        return constants | dict.fromkeys(absent if form.slopes else (*absent, "slopes_ptr"))


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel takes for granted, as `triton_launch` chooses it: the tile's head dimension, and the rest.

    `group` 0: any, and pages of any size; else it has every tuned tile.
    """

    dim: int
    exact: bool = True
    whole: bool = True
    window: bool = False
    group: int = 0
    softcap: bool = False
    slopes: bool = False
    pattern: bool = False
    before: bool = False


COMPACT_FORM = Form(128, group=7)


def _forms(dtype: str) -> list[Form]:
    any_head = [Form(dim, exact=False, whole=False, window=True) for dim in EXACT_DIMS]
    if dtype == FP32:
        return any_head
    pages_and_windows = itertools.product(EXACT_DIMS, (True,), (True, False), (False, True))
    tuned = [Form(dim, group=group) for dim, group in itertools.product(TUNED_DIMS, TUNED_GROUPS)]
    capped = itertools.product((128, 256), (True,), (True, False), (False, True), (0,), (True,))
    rare = [*pages_and_windows, *(capped if dtype == BF16 else ())]
    if dtype == BF16:
        placed = itertools.product((64, 128), (True, False))
        any_head += [Form(dim, whole=whole, slopes=True) for dim, whole in placed]
        any_head += [Form(128, whole=whole, pattern=True) for whole in (True, False)]
    return tuned + [Form(*each) for each in rare] + any_head


def before_forms() -> list[Form]:
    """Decode rows of which other kernels attend the first keys: of any group, and pages of any size."""
    exact = [Form(dim, whole=whole, before=True) for dim, whole in itertools.product(EXACT_DIMS, (True, False))]
    return exact + [Form(dim, exact=False, whole=False, window=True, before=True) for dim in EXACT_DIMS]


def _register(sm: int, kind: Kind, form: Form) -> None:
    """Both kernels in one form: with every tile where it is tuned, else with the one that all others share.

    Chunks have no form with keys before.
    """
    compact = form == COMPACT_FORM and kind.dtype == (FP16 if sm < 80 else BF16)
    decodes = decode_configs(form.dim, kind.kv_bytes, sm)
    prefills = prefill_configs(form.dim, kind.kv_bytes, sm)
    if not form.group:
        decodes = [rare_decode_config(decodes[0], form.dim, kind.kv_bytes, sm)]
        prefills = [prefill_config(form.dim, kind.kv_bytes, sm, SHORT_CHUNK)]
    tiles = {(c.block_n, c.num_warps, c.stages, c.cvt): c for c in decodes}
    before = {"BEFORE": form.before} | dict.fromkeys(() if form.before else _BEFORE)
    rows = [] if kind.dtype == FP32 else [I32_DIVISIBLE]
    for row in rows if form.exact else [*rows, I32]:
        for decode in tiles.values():
            register_aot(
                decode_kernel,
                kind.signature(_DECODE | (_BEFORE if form.before else {}), row, form),
                [kind.constants(form, GROUP_TILE, decode) | before],
                options={"num_warps": decode.num_warps},
                min_sm=sm,
                max_sm=sm,
                compact=compact,
            )
        for prefill in () if form.before else prefills:
            register_aot(
                prefill_kernel,
                kind.signature(_PREFILL, row, form),
                [kind.constants(form, max(prefill.block_m, GROUP_TILE), prefill)],
                options={"num_warps": prefill.num_warps},
                min_sm=sm,
                max_sm=sm,
                compact=compact and (sm in (75, 80, 90) or not kind.fp8),
            )


def _register_plan(rows: int) -> None:
    pointers = dict.fromkeys(("seq_lens_ptr", "seq_slots_ptr", "items_ptr", "num_items_ptr"), "*i32")
    numbers = dict.fromkeys(("num_rows", "window", "capacity", "target_items"), I32)
    kinds = itertools.product(EXACT_DIMS, (1, 2, 4), SMS)
    splits = sorted({(config.min_split, config.max_split) for kind in kinds for config in decode_configs(*kind)})
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


def _register_fixed(sm: int, kind: Kind, form: Form) -> None:
    """Batch-invariant attention: one tile for decode rows and chunks."""
    config = fixed_config(form.dim, kind.kv_bytes, sm)
    own = _PREFILL | dict.fromkeys(("item_programs", "sums_from"), I32) | {
        name: _DECODE[name] for name in ("items_ptr", "num_items_ptr", "partial_ptr", "arrivals_ptr")
    }
    constants = kind.constants(form, config.block_m, config)
    register_aot(
        fixed_kernel,
        kind.signature(own | {"partial_max_ptr": _DECODE["partial_lse_ptr"]}, I32_DIVISIBLE, form),
        [{name: constants[name] for name in constants if name not in ("GROUP", "PAGE_SHIFT")} | {"SPLIT": SPLIT}],
        options={"num_warps": config.num_warps},
        min_sm=sm,
        max_sm=sm,
        compact=form == Form(128) and not kind.fp8,
    )


register_aot(
    fixed_plan_kernel,
    dict.fromkeys(("seq_lens_ptr", "items_ptr", "num_items_ptr"), "*i32") | {"seq_slots_ptr": I32_ANYWHERE}
    | dict.fromkeys(("num_rows", "window", "capacity"), I32),
    [{"SPLIT": SPLIT, "BLOCK_ROWS": rows} for rows in PLAN_ROWS],
    options={"num_warps": 4},
    min_sm=90,
    max_sm=90,
)
for _dtype, _fp8, _form in itertools.product((FP16, BF16), (False, True), before_forms()):
    _register(90, Kind(_dtype, _fp8), _form)
register_prefix(before_forms())
for _dim, _windowed, _fp8 in itertools.product(EXACT_DIMS, (False, True), (False, True)):
    _register_fixed(90, Kind(BF16, _fp8), Form(_dim, window=_windowed))
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
    for _dtype in (FP16, FP32) if _sm < 80 else (FP16, BF16, FP32):
        for _fp8 in (False, True):
            for _form in _forms(_dtype):
                _register(_sm, Kind(_dtype, _fp8), _form)
