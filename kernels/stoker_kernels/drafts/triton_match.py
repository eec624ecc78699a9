"""Drafts from a sequence's own tokens in Triton: a program a row, which walks through its history once or twice.

Invariants: integers alone, so drafts equal those of the reference, but for `share`, a product of one rounding.
Knows nothing of who uses the drafts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.drafts.types import Matching
from stoker_kernels.launch.aot_registry import FP32, I32, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

_BLOCK = 1024
_DRAFTS = 16  # at least the drafts of a row; a power of two


@triton.jit
def _match_length(tokens, ends, known, most, BLOCK: tl.constexpr):
    """How many of the last tokens, at most `most`, also stand before and at each of `ends`."""
    inside = ends < known - 1
    alive = inside
    length = tl.zeros([BLOCK], tl.int32)
    for back in range(most):
        wanted = tl.load(tokens + known - 1 - back, mask=back < known, other=-1)
        token = tl.load(tokens + ends - back, mask=inside & (ends >= back), other=-2)
        alive = alive & (token == wanted)
        length += alive.to(tl.int32)
    return length


@kernel
def _match_drafts_kernel(
    row_slots,
    caps,
    position,
    history,
    drafts,
    rows,
    stride,
    history_length,
    k,
    least,
    most,
    factor,
    share,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slots + row)
    cap = tl.minimum(tl.load(caps + row), k)
    known = tl.where((slot >= 0) & (cap > 0), tl.load(position + tl.maximum(slot, 0)) + 1, 0)
    known = tl.minimum(known, history_length)
    tokens = history + tl.maximum(slot, 0).to(tl.int64) * stride
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, known, BLOCK):
        ends = start + tl.arange(0, BLOCK)
        length = _match_length(tokens, ends, known, most, BLOCK)
        best = tl.maximum(best, (length.to(tl.int64) << 32) | ends.to(tl.int64))
    found = tl.max(best, axis=0)
    matched = (found >> 32).to(tl.int32)
    last = (found & 0x7FFFFFFF).to(tl.int32)
    period = tl.maximum(known - 1 - last, 1)
    count = tl.where((matched >= least) & (matched > 0), cap, 0)
    if factor > 0:
        count = tl.minimum(count, (factor * matched.to(tl.float32)).to(tl.int32))
    index = tl.arange(0, DRAFTS)
    if (share > 0) & (count > 0):
        agreeing = tl.zeros([DRAFTS], tl.int32)
        total = 0
        for start in range(0, known, BLOCK):
            ends = start + tl.arange(0, BLOCK)
            alive = (ends < known - 1) & (_match_length(tokens, ends, known, most, BLOCK) == matched)
            total += tl.sum(alive.to(tl.int32), axis=0)
            for at in range(count):
                place = ends + 1 + at
                place = tl.where(place < known, place, last + 1 + (place - known) % period)
                token = tl.load(tokens + place, mask=alive, other=-1)
                alive = alive & (token == tl.load(tokens + last + 1 + at % period))
                agreeing += tl.where(index == at, tl.sum(alive.to(tl.int32), axis=0), 0)
        short = (index < count) & (agreeing.to(tl.float32) < share * total)
        count = tl.minimum(count, tl.min(tl.where(short, index, DRAFTS), axis=0))
    guess = tl.load(tokens + last + 1 + index % period, mask=index < count, other=-1)
    tl.store(drafts + index * rows + row, guess, mask=index < k)


def match_drafts(
    row_slots: Tensor, caps: Tensor, position: Tensor, history: Tensor, rules: Matching, *, out: Tensor
) -> None:
    """`drafts.match_drafts` on CUDA. Raises ValueError for more drafts than a program holds."""
    k, rows = out.shape
    if k > _DRAFTS:
        raise ValueError(f"{k} drafts a row; the kernel takes up to {_DRAFTS}")
    _match_drafts_kernel[(rows,)](
        row_slots,
        caps,
        position,
        history,
        out,
        rows,
        history.stride(0),
        history.shape[1],
        k,
        rules.least,
        rules.most,
        float(rules.factor),
        float(rules.share),
        BLOCK=_BLOCK,
        DRAFTS=_DRAFTS,
        **launch_options(row_slots.device),
    )


register_aot(
    _match_drafts_kernel,
    dict.fromkeys(("row_slots", "caps", "position", "history", "drafts"), f"*{I32}")
    | dict.fromkeys(("rows", "stride", "history_length", "k", "least", "most"), I32)
    | {"factor": FP32, "share": FP32},
    [{"BLOCK": _BLOCK, "DRAFTS": _DRAFTS}],
)
