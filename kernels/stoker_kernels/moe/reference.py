"""Mixtures of experts in plain PyTorch: oracle and CPU backend.

Invariants: scores and weights in fp32; an expert's products accumulate as torch's do, the product of gate and up is
rounded to x's dtype before down, and the weighted sum is fp32 with one rounding at the end.
Knows nothing of dispatch, of plans or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.launch.deliver import deliver
from stoker_kernels.moe.layouts.int4 import int4_values
from stoker_kernels.moe.layouts.int8 import int8_values
from stoker_kernels.moe.layouts.mxfp4 import unpack_mxfp4
from stoker_kernels.moe.layouts.nvfp4 import unpack_nvfp4
from stoker_kernels.moe.types import CLAMPED_SLOPE, ExpertActivation, ExpertWeights, Routes, Routing
from stoker_kernels.quant import BLOCK, Quantized, quantize_int8


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
) -> Routes:
    """The experts of each token, best first."""
    logits = logits.float()
    if routing.scoring == "sparsemixer":
        ids, weights = _sparsemixer(logits, routing)
    else:
        scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
        choice = logits if routing.scoring == "softmax" and bias is None else scores
        choice = choice if bias is None else choice + bias.float()
        # Stable: of equals the first.
        ids = _in_groups(choice, routing).sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
        weights = scores.gather(1, ids)
        if routing.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    ids = ids.to(torch.int32)
    if slot_mapping is not None:
        ids = torch.where(slot_mapping[:, None] < 0, -1, ids)
    if counts is not None:
        counts.copy_(torch.bincount(ids[ids >= 0], minlength=logits.shape[1]))
    return Routes(ids, weights * routing.scale)


def keep_experts(routes: Routes, first: int, count: int) -> Routes:
    """The routes to `count` experts from `first` on."""
    here = (routes.ids >= first) & (routes.ids < first + count)
    return Routes(torch.where(here, routes.ids - first, -1), routes.weights)


def _in_groups(choice: Tensor, routing: Routing) -> Tensor:
    """`choice`, −inf outside of each token's best groups."""
    if routing.groups == 1:
        return choice
    grouped = choice.view(len(choice), routing.groups, choice.shape[1] // routing.groups)
    best = grouped.topk(2 if routing.group_score == "top2" else 1, dim=-1).values.sum(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    inside = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return grouped.masked_fill(~inside[..., None], float("-inf")).view_as(choice)


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Sparse mixing without its training noise (Liu et al. 2024, arXiv:2409.12136)."""
    left = logits
    ids, weights = [], []
    for _ in range(routing.top_k):
        best, chosen = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * routing.jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, chosen))
        left = left.scatter(1, chosen, float("-inf"))
        ids.append(chosen)
    return torch.cat(ids, 1), torch.cat(weights, 1)


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
    """Expert by expert, each over its tokens; added up choice by choice."""
    tokens, top_k = routes.ids.shape
    given = x.new_zeros((tokens * top_k, weights.hidden))
    read = as_read(x, weights)
    flat = routes.ids.flatten()
    for expert in flat.unique().tolist():
        if expert < 0:
            continue
        pairs = (flat == expert).nonzero()[:, 0]
        gate_up, down = matrices(weights, expert, x.dtype)
        both = _linear(read[pairs // top_k], gate_up, weights.gate_up_bias, expert)
        inner = activate(both, activation, limit).to(x.dtype)
        inner = as_read(inner, weights)
        given[pairs] = _linear(inner, down, weights.down_bias, expert).to(x.dtype)
    sums = torch.zeros((tokens, weights.hidden), dtype=torch.float32, device=x.device)
    for choice in range(top_k):
        weight = routes.weights[:, choice, None].masked_fill(routes.ids[:, choice, None] < 0, 0.0)
        sums += weight * given.view(tokens, top_k, -1)[:, choice].float()
    if shared is not None:
        sums += shared.float() if shared_gate is None else shared_gate.float().sigmoid() * shared.float()
    return deliver(sums, x.dtype, out)


def activate(both: Tensor, activation: ExpertActivation, limit: float) -> Tensor:
    """act(gate) · up of [T, 2F], gate first, or the activation of [T, F] that has no gate, in fp32."""
    if activation == "relu2":
        return functional.relu(both.float()).square()
    gate, up = both.float().chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1.0) * gate * torch.sigmoid(CLAMPED_SLOPE * gate)


def as_read(x: Tensor, weights: ExpertWeights) -> Tensor:
    """What products with `weights` read of x."""
    if weights.takes_int8:
        return rounded_int8(x)
    return rounded(x) if weights.takes_quantized else x


def rounded_int8(x: Tensor) -> Tensor:
    """x in integers of eight bits with a scale a token, in x's dtype's place: fp32 values."""
    data, scale = quantize_int8(x)
    return data.float() * scale


def rounded(x: Tensor) -> Tensor:
    """x as FP8 holds it, a scale a token, in x's dtype's place: fp32 values."""
    quantized = Quantized.of(x.float())
    return quantized.data.float() * quantized.scale


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    y = functional.linear(x.to(weight.dtype), weight)
    return y if bias is None else y + bias[expert].to(y.dtype)


def matrices(weights: ExpertWeights, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gate-up and down of an expert; of one in FP8 or FP4 their values in fp32, of one in integers in `dtype`."""
    gate_up, down = weights.gate_up[expert], weights.down[expert]
    if weights.gate_up_scale is None or weights.down_scale is None:
        return gate_up, down
    gate_up_scale, down_scale = weights.gate_up_scale[expert], weights.down_scale[expert]
    if weights.kind == "mxfp4":
        return unpack_mxfp4(gate_up, gate_up_scale), unpack_mxfp4(down, down_scale)
    if weights.gate_up_factor is not None and weights.down_factor is not None:
        up = unpack_nvfp4(gate_up, gate_up_scale) * weights.gate_up_factor[expert, :, None]
        return up, unpack_nvfp4(down, down_scale) * weights.down_factor[expert, :, None]
    if weights.in_integers:
        values = int4_values if weights.kind == "int4" else int8_values
        return values(gate_up, gate_up_scale, weights.group, dtype), values(down, down_scale, weights.group, dtype)
    if weights.kind in ("fp8_channel", "int8_channel"):
        return gate_up.float() * gate_up_scale[:, None], down.float() * down_scale[:, None]
    parts = 2 if weights.gated else 1
    halves = zip(gate_up.chunk(parts), gate_up_scale.chunk(parts), strict=True)
    return torch.cat([half.float() * _spread(scale, half) for half, scale in halves]), down.float() * _spread(
        down_scale, down
    )


def _spread(scale: Tensor, matrix: Tensor) -> Tensor:
    rows = scale.repeat_interleave(BLOCK, dim=0)[: matrix.shape[0]]
    return rows.repeat_interleave(BLOCK, dim=1)[:, : matrix.shape[1]]
