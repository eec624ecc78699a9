"""Mixtures of experts on a CPU where a token's bits do not depend on the batch.

Choosing is the reference's, one token at a time. Experts multiply all their tokens together, by products whose sums
have one order; what torch computes beside them goes one row at a time.
Invariants: those of `launch/each_row.py` and `launch/cpu_dot.py`; roundings as of the kernels on a GPU: after the
activation, after down, and after the sum, which goes over a token's choices in their order.
Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.cpu_dot import dot
from stoker_kernels.launch.deliver import deliver
from stoker_kernels.launch.each_row import each_row
from stoker_kernels.moe import reference
from stoker_kernels.moe.types import ExpertActivation, ExpertWeights, Routes, Routing

_activate = each_row(reference.activate, "both")
_rounded = each_row(reference.rounded, "x")
_rounded_int8 = each_row(reference.rounded_int8, "x")


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
) -> Routes:
    """`moe.route`."""
    found = []
    for token in range(max(1, len(logits))):
        part = slice(token, token + 1)
        slots = None if slot_mapping is None else slot_mapping[part]
        found.append(reference.route(logits[part], routing, bias=bias, slot_mapping=slots))
    ids = torch.cat([each.ids for each in found])
    if counts is not None:
        counts.copy_(torch.bincount(ids[ids >= 0], minlength=logits.shape[1]))
    return Routes(ids, torch.cat([each.weights for each in found]))


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
    """`moe.experts`."""
    tokens, top_k = routes.ids.shape
    given = x.new_zeros((tokens * top_k, weights.hidden))
    read = _read(x, weights) if tokens else x
    flat = routes.ids.flatten()
    for expert in flat.unique().tolist():
        if expert < 0:
            continue
        pairs = (flat == expert).nonzero()[:, 0]
        gate_up, down = (each if each.dtype is torch.bfloat16 else each.float() for each in
                         reference.matrices(weights, expert, x.dtype))  # fmt: skip
        both = _biased(dot(read[pairs // top_k], gate_up), weights.gate_up_bias, expert)
        inner = _activate(both, activation, limit).to(x.dtype)
        inner = _read(inner, weights)
        given[pairs] = _biased(dot(inner, down), weights.down_bias, expert).to(x.dtype)
    sums = torch.zeros((tokens, weights.hidden), dtype=torch.float32)
    for choice in range(top_k):
        weight = routes.weights[:, choice, None].masked_fill(routes.ids[:, choice, None] < 0, 0.0)
        sums += weight * given.view(tokens, top_k, -1)[:, choice].float()
    if shared is not None:
        sums += shared.float() if shared_gate is None else _opened(shared_gate.float()) * shared.float()
    return deliver(sums, x.dtype, out)


def _read(x: Tensor, weights: ExpertWeights) -> Tensor:
    read: Tensor = x
    if weights.takes_int8:
        read = _rounded_int8(x)
    elif weights.takes_quantized:
        read = _rounded(x)
    return read


def _sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


_opened = each_row(_sigmoid, "x")


def _biased(y: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return y if bias is None else y + bias[expert].float()
