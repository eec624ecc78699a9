"""Choosing experts and sorting tokens by them, in Triton: one small kernel for few tokens, two for many.

A program of the first kind chooses for a few tokens, a warp each; where those are all, it sorts their pairs and lays
out tiles, too. The sort of many is a program an expert, which counts the pairs of those before it and writes its own:
no atomics, so the order is the tokens'.
Between two layers the weights of experts go through the L2 and take the kernel's code out of it, so what counts is how
many instructions there are: loops stay loops, and pairs are compared with pairs, not with experts.
Invariants: `plan.order` lists an expert's pairs in the order of tokens; an entry of `plan.tiles` is written by exactly
one program, also where it stays empty.
Knows nothing of what experts compute.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.moe.tiles import PlanSizes, most_in_one, plan_sizes, power_of_two, sort_block
from stoker_kernels.moe.types import Plan, Routes, Routing

SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
SORT_WARPS = 8


@triton.jit
def _best_groups(choice, expert, group_size, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """`choice`, −inf outside of each token's best groups."""
    group = expert // group_size
    WIDTH: tl.constexpr = triton.next_power_of_2(GROUPS)
    column = tl.arange(0, WIDTH)
    worth = tl.full((choice.shape[0], WIDTH), float("-inf"), tl.float32)
    for each in tl.range(GROUPS, loop_unroll_factor=1):
        inside = tl.where((group == each)[None, :], choice, float("-inf"))
        best, first = tl.max(inside, axis=1, return_indices=True)
        if TOP2:
            best += tl.max(tl.where(expert[None, :] == first[:, None], float("-inf"), inside), axis=1)
        worth = tl.where(column[None, :] == each, best[:, None], worth)
    kept = tl.zeros(choice.shape, tl.int32)
    for _ in tl.range(TOP_GROUPS, loop_unroll_factor=1):
        chosen = tl.argmax(worth, axis=1)
        kept += (group[None, :] == chosen[:, None]).to(tl.int32)
        worth = tl.where(column[None, :] == chosen[:, None], float("-inf"), worth)
    return tl.where(kept > 0, choice, float("-inf"))


@triton.jit
def _choose(
    logits, bias, group_size, scale, jitter, expert, num_experts,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
):  # fmt: skip
    """fp32 logits [tokens, experts], −inf outside → ids and weights [tokens, CHOICES]."""
    top = tl.max(logits, axis=1)
    if SCORING == 0:
        powers = tl.exp(logits - top[:, None])
        total = tl.sum(powers, axis=1)
        scores = powers / total[:, None]
        choice = logits
    elif SCORING == 1:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores
    else:
        scores = logits
        choice = logits
    if bias is not None:
        choice = scores + tl.load(bias + expert, mask=expert < num_experts, other=0.0)[None, :]
    choice = tl.where((expert < num_experts)[None, :], choice, float("-inf"))
    if GROUPS > 1:
        choice = _best_groups(choice, expert, group_size, GROUPS, TOP_GROUPS, TOP2)
    column = tl.arange(0, CHOICES)
    ids = tl.full((logits.shape[0], CHOICES), -1, tl.int32)
    weights = tl.zeros((logits.shape[0], CHOICES), tl.float32)
    for each in tl.range(TOP_K, loop_unroll_factor=1):
        best, chosen = tl.max(choice, axis=1, return_indices=True)
        here = expert[None, :] == chosen[:, None]
        if SCORING == 2:
            bound = tl.maximum(tl.abs(logits), best[:, None])
            near = (best[:, None] - logits) / bound <= 2.0 * jitter
            weight = 1.0 / tl.sum(tl.where(near, tl.exp(choice - best[:, None]), 0.0), axis=1)
        elif SCORING == 0 and bias is None:
            weight = tl.exp(best - top) / total
        else:
            weight = tl.sum(tl.where(here, scores, 0.0), axis=1)
        ids = tl.where(column[None, :] == each, chosen[:, None], ids)
        weights = tl.where(column[None, :] == each, weight[:, None], weights)
        choice = tl.where(here, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=1)[:, None] + 1e-20)
    return ids, weights * scale


@kernel
def route_kernel(
    logits, bias, slots, ids, weights, order, tiles, counts,
    tokens, num_experts, logits_stride, group_size, scale, jitter, most,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    ALL: tl.constexpr, TILES: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    values = tl.load(
        logits + token[:, None].to(tl.int64) * logits_stride + expert[None, :],
        mask=(token[:, None] < tokens) & (expert[None, :] < num_experts), other=float("-inf"),
    ).to(tl.float32)  # fmt: skip
    values = tl.where((token < tokens)[:, None], values, tl.where((expert < num_experts)[None, :], 0.0, float("-inf")))
    chosen, weight = _choose(
        values, bias, group_size, scale, jitter, expert, num_experts,
        TOP_K, CHOICES, SCORING, RENORMALIZE, GROUPS, TOP_GROUPS, TOP2,
    )  # fmt: skip
    real = token < tokens
    if slots is not None:
        real = real & (tl.load(slots + token, mask=token < tokens, other=-1) >= 0)
    chosen = tl.where(real[:, None], chosen, -1)
    column = tl.arange(0, CHOICES)
    inside = (token[:, None] < tokens) & (column[None, :] < TOP_K)
    pair = token[:, None] * TOP_K + column[None, :]
    tl.store(ids + pair, chosen, mask=inside)
    tl.store(weights + pair, weight, mask=inside)
    if ALL:
        index = tl.arange(0, TOKENS * CHOICES)
        mine = tl.reshape(chosen, (TOKENS * CHOICES,))
        there, pairs = mine >= 0, tl.reshape(pair, (TOKENS * CHOICES,))
        same = mine[:, None] == mine[None, :]
        smaller = there[None, :] & (mine[None, :] < mine[:, None])
        earlier = (same & (index[None, :] < index[:, None])).to(tl.int32)
        place = tl.sum((smaller | (earlier > 0)).to(tl.int32), axis=1)
        tl.store(order + place, pairs, mask=there)
        first = there & (tl.sum(earlier, axis=1) == 0)
        tile = tl.sum((first[None, :] & smaller).to(tl.int32), axis=1)
        tl.store(tiles + tile * 3, mine, mask=first)
        tl.store(tiles + tile * 3 + 1, place, mask=first)
        tl.store(tiles + tile * 3 + 2, place + tl.sum(same.to(tl.int32), axis=1), mask=first)
        unused = tl.arange(0, TILES)
        spare = (unused >= tl.sum(first.to(tl.int32), axis=0)) & (unused < most)
        tl.store(tiles + unused * 3, 0, mask=spare)
        tl.store(tiles + unused * 3 + 1, 0, mask=spare)
        tl.store(tiles + unused * 3 + 2, 0, mask=spare)
        if counts is not None:
            count = tl.sum((expert[:, None] == mine[None, :]).to(tl.int32), axis=1)
            tl.store(counts + expert, count, mask=expert < num_experts)


@kernel
def sort_kernel(
    ids, order, tiles, counts, pairs, most, TILE: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    # A program an expert. Those before it end `start` pairs into the order and fill ⌊start / TILE⌋ + expert tiles at
    # most, so that each finds its own entries without asking the others.
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    expert = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    smaller = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        found = tl.load(ids + first + offset, mask=first + offset < pairs, other=-1)
        smaller += ((found >= 0) & (found < expert)).to(tl.int32)
        own += (found == expert).to(tl.int32)
    start, count = tl.sum(smaller, axis=0), tl.sum(own, axis=0)
    place = start
    for first in range(0, pairs, BLOCK):
        found = tl.load(ids + first + offset, mask=first + offset < pairs, other=-1)
        hit = (found == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(hit, axis=0) - 1, first + offset, mask=hit > 0)
        place += tl.sum(hit, axis=0)
    first_tile = start // TILE + expert
    end_tile = (start + count) // TILE + expert + 1
    if expert == tl.num_programs(0) - 1:
        end_tile = most
    for tile in range(first_tile, end_tile):
        begin = start + (tile - first_tile) * TILE
        tl.store(tiles + tile * 3, expert)
        tl.store(tiles + tile * 3 + 1, begin)
        tl.store(tiles + tile * 3 + 2, tl.minimum(begin + TILE, start + count))
    if counts is not None:
        tl.store(counts + expert, count)


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
) -> Routes:
    """`moe.route` on CUDA."""
    sizes = plan_sizes(len(logits), routing.top_k, logits.shape[1], packed=routing.packed)
    return choose(logits, routing, sizes, bias=bias, slot_mapping=slot_mapping, counts=counts)


def choose(
    logits: Tensor,
    routing: Routing,
    sizes: PlanSizes,
    *,
    bias: Tensor | None,
    slot_mapping: Tensor | None,
    counts: Tensor | None,
) -> Routes:
    """The same with a plan of these sizes."""
    tokens, num_experts = logits.shape
    top_k, device = routing.top_k, logits.device
    most, rows, alone = sizes.most, sizes.rows, sizes.alone
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    order = torch.empty(tokens * top_k, dtype=torch.int32, device=device)
    tiles = torch.empty((most, 3), dtype=torch.int32, device=device)
    plan = Plan(order, tiles, sizes.tile, num_experts)
    if tokens == 0:
        return Routes(ids, weights, plan)
    route_kernel[(triton.cdiv(tokens, rows),)](
        logits, bias, slot_mapping, ids, weights, order, tiles, counts if alone else None,
        tokens, num_experts, logits.stride(0), num_experts // routing.groups, routing.scale, routing.jitter, most,
        TOKENS=rows, EXPERTS=max(2, power_of_two(num_experts)), TOP_K=top_k, CHOICES=max(2, power_of_two(top_k)),
        SCORING=SCORINGS[routing.scoring], RENORMALIZE=routing.renormalize, GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups, TOP2=routing.groups > 1 and routing.group_score == "top2", ALL=alone,
        TILES=most_in_one(rows, top_k, num_experts) if alone else 1, num_warps=rows, **launch_options(device),
    )  # fmt: skip
    if not alone:
        sort_kernel[(num_experts,)](
            ids, order, tiles, counts, tokens * top_k, most, TILE=plan.tokens, BLOCK=sort_block(tokens * top_k),
            num_warps=SORT_WARPS, **launch_options(device),
        )  # fmt: skip
    return Routes(ids, weights, plan)
