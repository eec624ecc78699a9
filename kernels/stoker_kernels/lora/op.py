"""Adds what adapters change to the result of a linear layer, each token by its own adapter: y += B·(A·x).

A step is planned once (`gather_adapters`, `group_tokens`), for all its layers. Then a product with few ranks (shrink)
goes to a scratch buffer and a second one (expand) is added to y in place. The linear's own product comes between the
two: a GPU brings its weights in while the one ends.

Invariants: fixed shapes, and everything that depends on values is read on the device, so a CUDA graph may capture it;
a token without an adapter is not touched; a token belongs to one tile, so nothing is added by atomics and the order of
sums is fixed. Knows nothing of the linear's own product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports
from stoker_kernels.lora import cluster_shrink, mma_expand
from stoker_kernels.lora.cluster_shrink import row_ranks
from stoker_kernels.lora.types import TILE, LoraPlan, LoraTarget, plan_tiles
from stoker_kernels.quant import Quantized

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_PIECES = 4
"""Runs of rows of one matrix: Q, K, V and a gate; the kernels take three at a time."""
MAX_SPLITS = 16
SPLIT_COLUMNS = 256
"""Columns of x that one program of a step of few tokens shrinks, unless that takes more than MAX_SPLITS."""
_PROGRAMS = 128
"""Programs that shrink, as far as splits go: each split more is read again by every block of rows."""

for _op in ("gather_adapters", "group_tokens"):
    register(_op, "triton", f"stoker_kernels.lora.triton_plan:{_op}", triton_supports(torch.int32))
    register(_op, "reference", f"stoker_kernels.lora.reference:{_op}", reference_supports)
register("shrink_lora", "clusters", "stoker_kernels.lora.cluster_shrink:shrink_lora", cluster_shrink.supports)
for _op in ("expand_lora", "expand_silu_mul"):
    register(_op, "mma", f"stoker_kernels.lora.mma_expand:{_op}", mma_expand.supports)
for _op in ("shrink_lora", "expand_lora", "expand_silu_mul", "add_lora_embedding"):
    register(_op, "triton", f"stoker_kernels.lora.triton_lora:{_op}", triton_supports(*_FLOATS))
    register(_op, "reference", f"stoker_kernels.lora.reference:{_op}", reference_supports)


def gather_adapters(
    row_slots: Tensor, query_start: Tensor, slot_adapters: Tensor, rows: Tensor, tokens: Tensor
) -> None:
    """The adapter slot of each row and token of a step; −1 for none, and for padding.

    `row_slots [S]`, `query_start [S+1]`, `slot_adapters [slots]` (what each sequence slot has), all int32; fills
    `rows [S]` and `tokens [T]`, int32.
    """
    select("gather_adapters", row_slots.device, row_slots.dtype)(row_slots, query_start, slot_adapters, rows, tokens)


def group_tokens(adapters: Tensor, slots: int, plan: LoraPlan) -> None:
    """Fill `plan` from the adapter slot of each token, `adapters [T]` int32 in −1 … slots − 1; a turn more.

    Tokens of a slot keep their order; slots come in theirs. `plan` is `LoraPlan.of(T, slots)`.
    """
    select("group_tokens", adapters.device, adapters.dtype)(adapters, slots, plan)


def shrink_lora(
    x: Tensor | Quantized, target: LoraTarget, plan: LoraPlan, scratch: Tensor, *, planned: bool = False
) -> int:
    """A·x into `scratch`, which nothing else may use until `expand_lora` has read it; → the parts it is the sum of.

    x: [T, K] of A's dtype, or `Quantized` as the linear takes it. scratch: fp32, at least `scratch_elements(T, …)`.
    planned: `group_tokens` and the launch after it have ended before the launch before this one began.

    Raises:
        ValueError: shapes that do not fit each other.
        KernelUnavailable: no implementation for the device and dtype.
    """
    data = x.data if isinstance(x, Quantized) else x
    if data.shape[1] != target.a.shape[-1]:
        raise ValueError(f"x {tuple(data.shape)} does not fit A {tuple(target.a.shape)}")
    _check(data.shape[0], target, scratch)
    return int(select("shrink_lora", data.device, target.a.dtype)(x, target, plan, scratch, planned))


def expand_lora(
    y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, *, parts: int, planned: bool = False
) -> None:
    """y += B·(what `shrink_lora` left in `scratch`, in `parts` parts), in place; `planned` as there.

    y: [T, N], rows contiguous, of B's dtype. Sums are fp32; A·x is rounded once to y's dtype.

    Raises:
        ValueError: shapes that do not fit each other.
        KernelUnavailable: no implementation for the device and dtype.
    """
    if y.shape[1] != sum(target.rows):
        raise ValueError(f"y {tuple(y.shape)} does not fit rows {target.rows}")
    _check(y.shape[0], target, scratch)
    select("expand_lora", y.device, y.dtype)(y, target, plan, scratch, parts, planned)


def expand_silu_mul(
    y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, *, parts: int, planned: bool = False
) -> Tensor:
    """silu(gate) · up `[T, F]` of `expand_lora`'s result, which is not rounded in between; y `[T, 2F]` may be changed.

    `target` has gate and up as its pieces; everything else, and what is raised, as in `expand_lora`.
    """
    if len(target.rows) != 2 or target.rows[0] != target.rows[1] or y.shape[1] != sum(target.rows):
        raise ValueError(f"y {tuple(y.shape)} does not fit a gate and an up of {target.rows} rows")
    _check(y.shape[0], target, scratch)
    out = y.new_empty((y.shape[0], target.rows[0]))
    select("expand_silu_mul", y.device, y.dtype)(y, target, plan, scratch, out, parts, planned)
    return out


def add_lora_embedding(y: Tensor, ids: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor) -> None:
    """y += B·A[:, id] in place: both steps for an embedding, whose `x` would be one-hot. `ids [T]` int32."""
    if y.shape[1] != sum(target.rows) or len(target.rows) != 1:
        raise ValueError(f"y {tuple(y.shape)} does not fit B {tuple(target.b.shape)}")
    _check(y.shape[0], target, scratch)
    select("add_lora_embedding", y.device, y.dtype)(y, ids, target, plan, scratch)


def splits_of(plan: LoraPlan, columns: int) -> int:
    """Parts into which a step cuts `columns` columns of x, summed in order afterwards."""
    return _splits(plan.adapters.shape[0], columns)


def scratch_elements(tokens: int, slots: int, max_rank: int, pieces: int, columns: int) -> int:
    """fp32 elements of scratch that shrinking takes for `tokens` tokens of up to `columns` columns."""
    tiles = plan_tiles(tokens, slots)
    sums = tiles * TILE * pieces * max_rank * _splits(tiles, columns)
    return max(sums, -(-tokens * pieces * row_ranks(max_rank) // 2))  # of `shrink_rows`, in 16 bits


def most_scratch_elements(tokens: int, slots: int, max_rank: int, pieces: int, columns: int) -> int:
    """`scratch_elements` of the step of up to `tokens` tokens that takes most: one of few may, as parts are more."""
    few = min(tokens, _PROGRAMS * TILE)
    return max(scratch_elements(each, slots, max_rank, pieces, columns) for each in {*range(1, few + 1), tokens})


def _splits(tiles: int, columns: int) -> int:
    return max(1, min(MAX_SPLITS, -(-columns // SPLIT_COLUMNS), -(-_PROGRAMS // tiles)))


def _check(tokens: int, target: LoraTarget, scratch: Tensor) -> None:
    if not 1 <= len(target.rows) <= MAX_PIECES:
        raise ValueError(f"a linear has 1 to {MAX_PIECES} pieces, not {len(target.rows)}")
    slots, ranks, pieces, columns = target.a.shape
    needed = scratch_elements(tokens, slots, ranks, pieces, columns)
    if scratch.numel() < needed:
        raise ValueError(f"scratch has {scratch.numel()} elements, {tokens} tokens need {needed}")
