"""`route` and `experts` on CUDA: our Hopper kernels for the fewest tokens and for many, else Triton.

Invariants: which of them follows from the operands' shapes and dtypes alone.
Does not know: which layer it serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import sm_count
from stoker_kernels.moe.hopper import sm90_few, sm90_grouped, sm90_packed, sm90_route, sm90_unpacked
from stoker_kernels.moe.tiles import in_one_program
from stoker_kernels.moe.types import ExpertActivation, ExpertKind, ExpertWeights, Routes, Routing, given

# Tokens up to which the Hopper kernels for few are faster.
FEW_TOKENS = {"dense": 2, "fp8_channel": 2, "fp8_block": 2, "mxfp4": 1, "nvfp4": 4, "int4": 1}
# Tokens an expert in the mean from which on those for many are faster: at 32 equal to Triton's, at 64 by 8 to 28%. Of
# four bits, which they multiply as bf16, as many as make up for that.
MANY_TOKENS = {"dense": 64, "fp8_channel": 64, "fp8_block": 64, "mxfp4": 176, "nvfp4": 96, "int4": 224}
ONE_LAUNCH = range(1, 17)  # tokens that one CTA chooses for faster than two kernels


def few(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether the Hopper kernels for few tokens are faster for so many. Those of four bits ask for too little at a time
    where the link answers: of host memory Triton's read 42 to 46 GB/s, they 7 to 20.
    """
    return 0 < x.shape[0] <= FEW_TOKENS.get(weights.kind, 0) and not (weights.hosted and weights.in_four_bits)


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
) -> Routes:
    """`moe.route`."""
    from stoker_kernels.moe import triton_route

    if (
        len(logits) in ONE_LAUNCH
        and not in_one_program(len(logits), routing.top_k)
        and sm90_route.refusal(logits, routing, bias=bias, slot_mapping=slot_mapping, counts=counts) is None
    ):
        return sm90_route.route(logits, routing, bias=bias, slot_mapping=slot_mapping, counts=counts)
    return triton_route.route(logits, routing, bias=bias, slot_mapping=slot_mapping, counts=counts)


def many(x: Tensor, routes: Routes, weights: ExpertWeights) -> bool:
    """Whether the Hopper kernels for many tokens are faster for so many choices: of enough tiles for all SMs."""
    if routes.plan is None or weights.kind not in MANY_TOKENS:
        return False
    tokens = sm90_grouped.tokens_an_expert(routes)
    return tokens >= MANY_TOKENS[weights.kind] and sm90_grouped.tiles_of(weights, tokens) >= sm_count(x.device)


def scratch_bytes(kind: ExpertKind, sizes: tuple[int, int, int], tokens: float, *, gated: bool) -> int:
    """What `experts` takes on sm_90 beside activations, for experts of `sizes` (how many, F, H) that get so many tokens
    each in the mean: those in four bits become bf16.
    """
    if kind not in sm90_packed.KINDS or tokens < MANY_TOKENS[kind]:
        return 0
    return sm90_unpacked.scratch_bytes(*sizes, gated=gated)


def experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    *,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | Callable[[], Tensor] | None = None,
    shared_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`moe.experts`; `routes` has the plan of this package's `route`."""
    from stoker_kernels.moe import triton_experts

    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if few(x, weights):
        for_few = sm90_packed.experts if weights.in_four_bits else sm90_few.experts
        refusal = sm90_packed.refusal if weights.in_four_bits else sm90_few.refusal
        shared = given(shared, x)
        if refusal(x, routes, weights, shared) is None:
            return for_few(
                x, routes, weights, y, activation=activation, limit=limit, shared=shared, shared_gate=shared_gate
            )
    if x.shape[0] == 0:
        return y
    if many(x, routes, weights) and sm90_grouped.refusal(x, routes, weights, None) is None:
        rows = sm90_grouped.pair_rows(x, routes, weights, activation=activation, limit=limit)
    else:
        rows = triton_experts.pair_rows(x, routes, weights, activation=activation, limit=limit)
    return triton_experts.sum_pairs(rows, routes, y, shared=given(shared, x), shared_gate=shared_gate)
