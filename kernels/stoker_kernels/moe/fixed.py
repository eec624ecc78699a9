"""Mixtures of experts on a GPU where a token's bits do not depend on the batch: `triton_route.py` and
`triton_experts.py` in one way for any number of tokens.

Four tokens are chosen for by a program, a warp each, and sorted by others. An expert's weights are cut into tiles of 64
rows and go by in steps of as many columns, whatever else is computed: so each sum is over the same products in the same
order, by the instruction of 64 rows. How many tokens share a tile decides which column of it is a token's, and no more.
Invariants: what is compiled depends on the tokens of a tile alone, which are 64 at most.
Knows nothing of what is faster where any bits will do (`tiles.py`).
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.moe import triton_experts
from stoker_kernels.moe.tiles import FIXED_PACKED_TILE, FIXED_TILE, fixed_sizes
from stoker_kernels.moe.triton_route import choose
from stoker_kernels.moe.types import ExpertActivation, ExpertWeights, Routes, Routing


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
) -> Routes:
    """`moe.route`."""
    sizes = fixed_sizes(len(logits), routing.top_k, logits.shape[1])
    return choose(logits, routing, sizes, bias=bias, slot_mapping=slot_mapping, counts=counts)


def experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    *,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`moe.experts`; `routes` has the plan of this module's `route`."""
    tile = FIXED_PACKED_TILE if weights.in_four_bits else FIXED_TILE
    return triton_experts.experts(
        x, routes, weights, activation=activation, limit=limit, shared=shared, shared_gate=shared_gate, out=out,
        tile=tile,
    )  # fmt: skip
