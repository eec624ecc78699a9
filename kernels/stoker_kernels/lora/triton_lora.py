"""Shrink and expand in Triton, grouped by adapter slot: a program reads one slot's matrices for one tile of tokens.

Invariants: tiles without tokens, and ranks that a slot's adapter does not have, end at once and read nothing. Few
tokens shrink in several parts of the columns, which expand sums in their order; nothing is added by atomics. Where the
step was planned before (`planned`), plan and matrices are read while the launch before still runs.
Offsets within a slot are 32 bits of 16 elements each. Knows nothing of which layer it serves.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_ANYWHERE, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.lora.op import MAX_SPLITS, splits_of
from stoker_kernels.lora.types import TILE, LoraPlan, LoraTarget
from stoker_kernels.quant import Quantized

UNIT = tl.constexpr(16)
"""Elements in which strides of slots, ranks and pieces are counted."""
FEW_RANKS = tl.constexpr(16)
_ROWS = 128
_WARPS = 4  # of expand
_PARTS = (1, MAX_SPLITS)  # that it knows how to add up
_COLUMNS = 256  # of 16 bits a step; of 32 half as many, for the shared memory of sm_75
_ROW_COUNTS = ("rows_0", "rows_1", "rows_2")
_INTEGERS = (
    "slot_units",
    "rank_units",
    "piece_units",
    "max_rank",
    "pieces",
    "places",
    "splits",
    "columns_of_split",
    "tiles",
    "num_tokens",
    "rows",
    "vocab",
    *_ROW_COUNTS,
)


@kernel(do_not_specialize=list(_INTEGERS))
def lora_shrink_kernel(
    x, x_scale, a, ranks, order, adapters, scratch, columns, x_stride,
    slot_units, rank_units, piece_units, max_rank, pieces, places, columns_of_split,
    TILE: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, PLANNED: tl.constexpr, WIDEN: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    if not PLANNED:
        pdl_wait(LAUNCH_PDL)
    rank_blocks = (max_rank + RANKS - 1) // RANKS
    piece = tl.program_id(0) // rank_blocks
    rank = tl.program_id(0) % rank_blocks * RANKS + tl.arange(0, RANKS)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(adapters + tile)
    owned = tl.load(ranks + slot, mask=slot >= 0, other=0)
    place = tile * TILE + tl.arange(0, TILE)
    token = tl.load(order + place)
    weights = a + (slot.to(tl.int64) * slot_units + piece * piece_units) * UNIT
    weights += (rank.to(tl.int64) * rank_units * UNIT)[None, :]
    start = split * columns_of_split
    last = tl.minimum(start + columns_of_split, columns)
    column = start + tl.arange(0, COLUMNS)
    w = tl.load(weights + column[:, None], mask=(column[:, None] < last) & (rank[None, :] < owned), other=0.0)
    if PLANNED:
        pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    if tl.program_id(0) % rank_blocks * RANKS < owned:
        inputs = x + (token.to(tl.int64) * x_stride)[:, None]
        v = tl.load(inputs + column[None, :], mask=(token[:, None] >= 0) & (column[None, :] < last), other=0.0)
        v = v.to(w.dtype)
        if WIDEN:  # Triton's interpreter multiplies fp32 only
            v, w = v.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(v, w, input_precision="ieee")
        for first in range(start + COLUMNS, last, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            w = tl.load(weights + column[:, None], mask=(column[:, None] < last) & (rank[None, :] < owned), other=0.0)
            v = tl.load(inputs + column[None, :], mask=(token[:, None] >= 0) & (column[None, :] < last), other=0.0)
            v = v.to(w.dtype)
            if WIDEN:
                v, w = v.to(tl.float32), w.to(tl.float32)
            sums += tl.dot(v, w, input_precision="ieee")
        if x_scale is not None:
            sums *= tl.load(x_scale + token, mask=token >= 0, other=0.0)[:, None]
        at = ((split * places + place)[:, None] * pieces + piece) * max_rank + rank[None, :]
        tl.store(scratch + at, sums, mask=rank[None, :] < owned)


@kernel(do_not_specialize=list(_INTEGERS))
def lora_lookup_kernel(
    ids, a, ranks, order, adapters, scratch, slot_units, rank_units, max_rank, vocab,
    TILE: tl.constexpr, RANKS: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    # The shrinking of an embedding: column `id` of A.
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    rank = tl.program_id(0) * RANKS + tl.arange(0, RANKS)
    tile = tl.program_id(1)
    slot = tl.load(adapters + tile)
    owned = tl.load(ranks + slot, mask=slot >= 0, other=0)
    if tl.program_id(0) * RANKS < owned:
        place = tile * TILE + tl.arange(0, TILE)
        token = tl.load(order + place)
        known = tl.load(ids + token, mask=token >= 0, other=-1)
        weights = a + slot.to(tl.int64) * slot_units * UNIT + (rank.to(tl.int64) * rank_units * UNIT)[None, :]
        inside = (known[:, None] >= 0) & (known[:, None] < vocab) & (rank[None, :] < owned)
        value = tl.load(weights + known[:, None], mask=inside, other=0.0)
        tl.store(scratch + place[:, None] * max_rank + rank[None, :], value.to(tl.float32), mask=rank[None, :] < owned)


@triton.jit
def _shrunk(scratch, place, piece, pieces, rank, owned, max_rank, places, splits, SPLITS: tl.constexpr):
    # The sum of all splits, in their order; their loads wait for none of each other.
    at = (place[:, None] * pieces + piece) * max_rank + rank[None, :]
    found = tl.load(scratch + at, mask=rank[None, :] < owned, other=0.0)
    for split in tl.static_range(1, SPLITS):
        more = (rank[None, :] < owned) & (split < splits)
        found += tl.load(scratch + split * places * pieces * max_rank + at, mask=more, other=0.0)
    return found


@triton.jit
def _expanded(shrunk, w, WIDEN: tl.constexpr):
    v = shrunk.to(w.dtype)
    if WIDEN:  # Triton's interpreter multiplies fp32 only
        v, w = v.to(tl.float32), w.to(tl.float32)
    return tl.dot(v, w, input_precision="ieee")


@kernel(do_not_specialize=list(_INTEGERS))
def lora_expand_kernel(
    y, b, ranks, order, adapters, scratch, y_stride, rows_0, rows_1, rows_2,
    slot_units, rank_units, max_rank, pieces, places, splits,
    TILE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, PLANNED: tl.constexpr,
    WIDEN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    if not PLANNED:
        pdl_wait(LAUNCH_PDL)
    block = tl.program_id(0)
    tile = tl.program_id(1)
    slot = tl.load(adapters + tile)
    owned = tl.load(ranks + slot, mask=slot >= 0, other=0)
    # A block of rows lies within one piece.
    blocks_0 = (rows_0 + ROWS - 1) // ROWS
    blocks_1 = (rows_1 + ROWS - 1) // ROWS
    piece = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    start = tl.where(piece == 0, 0, tl.where(piece == 1, rows_0, rows_0 + rows_1))
    end = start + tl.where(piece == 0, rows_0, tl.where(piece == 1, rows_1, rows_2))
    skipped = tl.where(piece == 0, 0, tl.where(piece == 1, blocks_0, blocks_0 + blocks_1))
    row = start + (block - skipped) * ROWS + tl.arange(0, ROWS)
    place = tile * TILE + tl.arange(0, TILE)
    token = tl.load(order + place)
    weights = b + slot.to(tl.int64) * slot_units * UNIT + row[None, :]
    rank = tl.arange(0, RANKS)
    w = tl.load(
        weights + (rank.to(tl.int64) * rank_units * UNIT)[:, None],
        mask=(rank[:, None] < owned) & (row[None, :] < end), other=0.0,
    )  # fmt: skip
    if PLANNED:
        pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    if owned > 0:
        target = y + (token.to(tl.int64) * y_stride)[:, None] + row[None, :]
        mask = (token[:, None] >= 0) & (row[None, :] < end)
        before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        v = _shrunk(scratch, place, piece, pieces, rank, owned, max_rank, places, splits, SPLITS)
        sums = _expanded(v, w, WIDEN)
        if RANKS > FEW_RANKS:  # otherwise an adapter has no more
            for first in range(RANKS, owned, RANKS):
                rank = first + tl.arange(0, RANKS)
                w = tl.load(
                    weights + (rank.to(tl.int64) * rank_units * UNIT)[:, None],
                    mask=(rank[:, None] < owned) & (row[None, :] < end), other=0.0,
                )  # fmt: skip
                v = _shrunk(scratch, place, piece, pieces, rank, owned, max_rank, places, splits, SPLITS)
                sums += _expanded(v, w, WIDEN)
        tl.store(target, (before + sums).to(y.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=list(_INTEGERS))
def lora_expand_silu_kernel(
    y, out, b, ranks, order, adapters, tokens, scratch, y_stride, out_stride, rows, num_tokens, tiles,
    slot_units, rank_units, max_rank, pieces, places, splits,
    TILE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, PLANNED: tl.constexpr,
    WIDEN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    if not PLANNED:
        pdl_wait(LAUNCH_PDL)
    tile = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    planned = tile < tiles
    slot = tl.load(adapters + tile, mask=planned, other=-1)
    owned = tl.load(ranks + slot, mask=slot >= 0, other=0)
    place = tl.minimum(tile, tiles - 1) * TILE + tl.arange(0, TILE)
    # Beyond the plan's tiles come all tokens in their order, of which those without an adapter count.
    plain = (tile - tiles) * TILE + tl.arange(0, TILE)
    unowned = (plain >= 0) & (plain < num_tokens)
    label = tl.load(tokens + plain, mask=unowned, other=0)
    token = tl.where(planned, tl.load(order + place), tl.where(unowned & (label < 0), plain, -1))
    weights = b + slot.to(tl.int64) * slot_units * UNIT + row[None, :]
    rank = tl.arange(0, RANKS)
    lines = weights + (rank.to(tl.int64) * rank_units * UNIT)[:, None]
    inside = (rank[:, None] < owned) & (row[None, :] < rows)
    gates = tl.load(lines, mask=inside, other=0.0)
    ups = tl.load(lines + rows, mask=inside, other=0.0)
    if PLANNED:
        pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    source = y + (token.to(tl.int64) * y_stride)[:, None] + row[None, :]
    mask = (token[:, None] >= 0) & (row[None, :] < rows)
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + rows, mask=mask, other=0.0).to(tl.float32)
    if owned > 0:
        v = _shrunk(scratch, place, 0, pieces, rank, owned, max_rank, places, splits, SPLITS)
        gate += _expanded(v, gates, WIDEN)
        v = _shrunk(scratch, place, 1, pieces, rank, owned, max_rank, places, splits, SPLITS)
        up += _expanded(v, ups, WIDEN)
        if RANKS > FEW_RANKS:  # otherwise an adapter has no more
            for first in tl.range(RANKS, owned, RANKS, num_stages=1):  # parts in flight take shared memory
                rank = first + tl.arange(0, RANKS)
                lines = weights + (rank.to(tl.int64) * rank_units * UNIT)[:, None]
                inside = (rank[:, None] < owned) & (row[None, :] < rows)
                v = _shrunk(scratch, place, 0, pieces, rank, owned, max_rank, places, splits, SPLITS)
                gate += _expanded(v, tl.load(lines, mask=inside, other=0.0), WIDEN)
                v = _shrunk(scratch, place, 1, pieces, rank, owned, max_rank, places, splits, SPLITS)
                up += _expanded(v, tl.load(lines + rows, mask=inside, other=0.0), WIDEN)
    value = gate / (1.0 + tl.exp(-gate)) * up
    target = out + (token.to(tl.int64) * out_stride)[:, None] + row[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)


def shrink_lora(x: Tensor | Quantized, target: LoraTarget, plan: LoraPlan, scratch: Tensor, planned: bool) -> int:
    """A program for each block of ranks, tile and split of the columns."""
    data, scale = (x.data, x.scale) if isinstance(x, Quantized) else (x, None)
    _, max_rank, pieces, columns = target.a.shape
    slot_stride, rank_stride, piece_stride, _ = target.a.stride()
    splits = splits_of(plan, columns)
    step = _COLUMNS // (target.a.element_size() // 2)
    ranks = ranks_of(max_rank)
    lora_shrink_kernel[(pieces * triton.cdiv(max_rank, ranks), plan.adapters.shape[0], splits)](
        data, scale, target.a, target.ranks, plan.order, plan.adapters, scratch, columns, data.stride(0),
        slot_stride // 16, rank_stride // 16, piece_stride // 16, max_rank, pieces, plan.order.shape[0],
        triton.cdiv(triton.cdiv(columns, splits), step) * step,
        TILE=TILE, RANKS=ranks, COLUMNS=step, PLANNED=planned, WIDEN=interpreting(),
        **launch_options(data.device),
    )  # fmt: skip
    return splits


def expand_lora(y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, parts: int, planned: bool) -> None:
    """A program for each block of rows and tile."""
    _expand(y, target, plan, scratch, parts, planned)


def add_lora_embedding(y: Tensor, ids: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor) -> None:
    """Two launches: look up into `scratch`, expand onto y."""
    _, max_rank, _, vocab = target.a.shape
    slot_stride, rank_stride, *_ = target.a.stride()
    ranks = ranks_of(max_rank)
    lora_lookup_kernel[(triton.cdiv(max_rank, ranks), plan.adapters.shape[0])](
        ids, target.a, target.ranks, plan.order, plan.adapters, scratch,
        slot_stride // 16, rank_stride // 16, max_rank, vocab,
        TILE=TILE, RANKS=ranks, **launch_options(y.device),
    )  # fmt: skip
    _expand(y, target, plan, scratch, 1, planned=False)


def expand_silu_mul(
    y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, out: Tensor, parts: int, planned: bool
) -> None:
    """A program for each block of columns and tile, and as many for the tokens that no adapter has."""
    tokens, columns = out.shape
    _, max_rank, pieces, _ = target.a.shape
    slot_stride, rank_stride, _ = target.b.stride()
    tiles = plan.adapters.shape[0]
    lora_expand_silu_kernel[(triton.cdiv(columns, _ROWS), tiles + triton.cdiv(tokens, TILE))](
        y, out, target.b, target.ranks, plan.order, plan.adapters, plan.tokens, scratch, y.stride(0), out.stride(0),
        columns, tokens, tiles, slot_stride // 16, rank_stride // 16, max_rank, pieces, plan.order.shape[0], parts,
        TILE=TILE, RANKS=ranks_of(max_rank), ROWS=_ROWS, SPLITS=1 if parts == 1 else MAX_SPLITS,
        PLANNED=planned, WIDEN=interpreting(), num_warps=_WARPS, **launch_options(y.device),
    )  # fmt: skip


def ranks_of(max_rank: int) -> int:
    """Ranks that a program takes at a time."""
    return FEW_RANKS.value if max_rank <= FEW_RANKS.value else 32


def _expand(y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, splits: int, planned: bool) -> None:
    """A launch for three pieces at a time."""
    _, max_rank, pieces, _ = target.a.shape
    slot_stride, rank_stride, _ = target.b.stride()
    most = len(_ROW_COUNTS)
    for first in range(0, pieces, most):
        before, rows = sum(target.rows[:first]), target.rows[first : first + most]
        blocks = sum(triton.cdiv(each, _ROWS) for each in rows)
        lora_expand_kernel[(blocks, plan.adapters.shape[0])](
            y[:, before:], target.b[:, :, before:], target.ranks, plan.order, plan.adapters,
            scratch[first * max_rank :], y.stride(0), *(*rows, 0, 0)[:most],
            slot_stride // 16, rank_stride // 16, max_rank, pieces, plan.order.shape[0], splits,
            TILE=TILE, RANKS=ranks_of(max_rank), ROWS=_ROWS, SPLITS=1 if splits == 1 else MAX_SPLITS,
            PLANNED=planned, WIDEN=interpreting(), num_warps=_WARPS, **launch_options(y.device),
        )  # fmt: skip


def _register() -> None:
    common = {"ranks": I32_ANYWHERE, "order": f"*{I32}", "adapters": f"*{I32}", "scratch": f"*{FP32}"}
    common |= dict.fromkeys(_INTEGERS, I32)
    sizes = [{"TILE": TILE, "RANKS": ranks} for ranks in (16, 32)]
    planned = [each | {"PLANNED": early} for each in sizes for early in (False, True)]
    for dtype, min_sm in ((BF16, 80), (FP16, 75), (FP32, 75)):
        types = _taken(lora_lookup_kernel, common | {"ids": f"*{I32}", "a": f"*{dtype}", "vocab": I32})
        register_aot(lora_lookup_kernel, types, sizes, min_sm=min_sm, compact=dtype == BF16)
        for stride in (I32_DIVISIBLE, I32):
            types = {"y": f"*{dtype}", "b": f"*{dtype}", "y_stride": stride, **dict.fromkeys(_ROW_COUNTS, I32)}
            gated = types | {"out": f"*{dtype}", "tokens": f"*{I32}"}
            of_out = [gated | {"out_stride": of_half} for of_half in {stride, I32}]  # half an even number of rows
            added = [each | {"ROWS": _ROWS, "WIDEN": False, "SPLITS": parts} for each in planned for parts in _PARTS]
            for expand, taken in ((lora_expand_kernel, types), *((lora_expand_silu_kernel, each) for each in of_out)):
                register_aot(
                    expand, _taken(expand, common | taken), added, options={"num_warps": _WARPS}, min_sm=min_sm,
                    compact=dtype == BF16 and stride == I32_DIVISIBLE,
                )  # fmt: skip
        for quantized in ("", "fp8e4nv", "i8") if dtype != FP32 else ("",):
            types = {"x": f"*{quantized or dtype}", "a": f"*{dtype}"}
            types |= {"columns": I32_DIVISIBLE, "x_stride": I32_DIVISIBLE}
            types |= {"x_scale": f"*{FP32}"} if quantized else {}
            scale = {} if quantized else {"x_scale": None}
            wide = 2 if dtype == FP32 else 1
            register_aot(
                lora_shrink_kernel, _taken(lora_shrink_kernel, common | types),
                [each | {"COLUMNS": _COLUMNS // wide, "WIDEN": False} | scale for each in planned],
                min_sm={"fp8e4nv": 89, "i8": 80}.get(quantized, min_sm), compact=dtype == BF16,
            )  # fmt: skip


def _taken(function: Any, types: dict[str, str]) -> dict[str, str]:
    """Those of `types` that name an argument of the kernel."""
    return {name: kind for name, kind in types.items() if name in function.arg_names}


_register()
