"""Leaves of a routing the experts that are on this rank, in Triton: one kernel over the pairs and the tiles.

Invariants: `plan.order` stays as it is: tiles of other experts become empty, so nothing reads their pairs.
Knows nothing of what experts compute.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.moe.types import Plan, Routes

BLOCK, WARPS = 1024, 4


@kernel
def keep_kernel(
    ids, tiles, kept_ids, kept_tiles, pairs, most, first, count, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < pairs, other=-1)
    here = (expert >= first) & (expert < first + count)
    tl.store(kept_ids + at, tl.where(here, expert - first, -1), mask=at < pairs)
    inside = at < most
    owner = tl.load(tiles + at * 3, mask=inside, other=0)
    begin = tl.load(tiles + at * 3 + 1, mask=inside, other=0)
    end = tl.load(tiles + at * 3 + 2, mask=inside, other=0)
    mine = (owner >= first) & (owner < first + count)
    tl.store(kept_tiles + at * 3, tl.where(mine, owner - first, 0), mask=inside)
    tl.store(kept_tiles + at * 3 + 1, tl.where(mine, begin, 0), mask=inside)
    tl.store(kept_tiles + at * 3 + 2, tl.where(mine, end, 0), mask=inside)


def keep_experts(routes: Routes, first: int, count: int) -> Routes:
    """`moe.keep_experts` on CUDA."""
    plan = routes.plan
    if plan is None:
        raise ValueError("experts on CUDA read the plan of route on CUDA: --kernel route=reference has none")
    ids, tiles = torch.empty_like(routes.ids), torch.empty_like(plan.tiles)
    pairs, most = ids.numel(), tiles.shape[0]
    if pairs:
        keep_kernel[(triton.cdiv(max(pairs, most), BLOCK),)](
            routes.ids, plan.tiles, ids, tiles, pairs, most, first, count, BLOCK=BLOCK, num_warps=WARPS,
            **launch_options(ids.device),
        )  # fmt: skip
    return Routes(ids, routes.weights, Plan(plan.order, tiles, plan.tokens, plan.experts))
