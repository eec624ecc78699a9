"""`mixture`: choosing experts and running them, in two kernels for the fewest tokens on Hopper, else one op after the
other.

Invariants: which of them follows from shapes and dtypes alone, and from what is pinned: who pins an implementation of
`route` or of `experts` gets it.
Does not know: which layer it serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import select
from stoker_kernels.moe import choose, op
from stoker_kernels.moe.hopper import sm90_few
from stoker_kernels.moe.types import ExpertActivation, ExpertWeights, Routing, given


def split(
    x: Tensor,
    logits: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | Callable[[], Tensor] | None = None,
    shared_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`route`, then `experts`."""
    routes = op.route(logits, routing, bias=bias, slot_mapping=slot_mapping, counts=counts)
    return op.experts(
        x, routes, weights, activation=activation, limit=limit, shared=shared, shared_gate=shared_gate, out=out
    )


def fused(
    x: Tensor,
    logits: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | Callable[[], Tensor] | None = None,
    shared_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The experts' kernels choose, too, where they take the operands; else as `split`."""
    if few := choose.few(x, weights):
        shared = given(shared, x)
    if callable(shared) or not (
        few
        and _as_usual(x, logits, weights)
        and sm90_few.mixture_refusal(
            x, logits, routing, weights, shared, bias=bias, slot_mapping=slot_mapping, counts=counts
        ) is None
    ):
        return split(
            x, logits, routing, weights, bias=bias, slot_mapping=slot_mapping, counts=counts, activation=activation,
            limit=limit, shared=shared, shared_gate=shared_gate, out=out,
        )  # fmt: skip
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    return sm90_few.mixture(
        x, logits, routing, weights, y, bias=bias, slot_mapping=slot_mapping, counts=counts, activation=activation,
        limit=limit, shared=shared, shared_gate=shared_gate,
    )  # fmt: skip


def _as_usual(x: Tensor, logits: Tensor, weights: ExpertWeights) -> bool:
    """Whether `split` would run this package's router and Hopper kernels."""
    usual = select("route", logits.device, logits.dtype) is choose.route
    return usual and select("experts", x.device, weights.down.dtype) is choose.experts
