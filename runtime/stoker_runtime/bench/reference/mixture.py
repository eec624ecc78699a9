"""The mixture of experts once more, as plainly as PyTorch can say it: a part of the oracle `reference.model`.

Invariants: fp32 throughout, expert by expert; shares only the weights with the engine.
Knows nothing of the kernels' ways to choose, sort or multiply.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker_kernels.moe import ExpertWeights
from stoker_kernels.quant import LinearWeight
from stoker_runtime.bench.reference.rounding import NONE, Rounding
from stoker_runtime.bench.reference.weights import (
    as_fp8_reads,
    as_int8_reads,
    fp4_expert_values,
    fp8_values,
    int4_expert_values,
    int8_expert_values,
)
from stoker_runtime.models.decoder_weights import MixtureWeights
from stoker_runtime.models.moe_spec import MoeSpec

SLOPE = 1.702  # of the sigmoid in clamped SwiGLU


def mixture(
    spec: MoeSpec, weights: MixtureWeights, x: Tensor, shared: Tensor | None, rounding: Rounding = NONE
) -> Tensor:
    """What the experts of each row of x [T, H] give, and what is shared.

    `rounding`: of what the router reads and says, as in any engine: it may then choose another expert.
    """
    logits = F.linear(rounding.rounded(x), weights.router.data.float())
    if weights.router_bias is not None:
        logits = logits + weights.router_bias.float()
    chosen = _choose(spec, rounding.moved(logits), weights.correction_bias)
    result = torch.zeros_like(x)
    for expert in range(spec.experts):
        tokens = chosen[:, expert].nonzero()[:, 0]
        if len(tokens):
            result[tokens] += chosen[tokens, expert, None] * _expert(spec, weights.experts, expert, x[tokens])
    if shared is None:
        return result
    if weights.shared_gate is not None:
        shared = torch.sigmoid(F.linear(x, weights.shared_gate.data.float())) * shared
    return result + shared


def _choose(spec: MoeSpec, logits: Tensor, correction: Tensor | None) -> Tensor:
    """The weight of each expert for each token, [T, E]; 0 for those that are not chosen."""
    if spec.scoring == "sparsemixer":
        return _sparsemixer(spec, logits)
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
    ranked = scores if correction is None else scores + correction.float()
    if spec.groups > 1:
        groups = ranked.unflatten(1, (spec.groups, -1))
        worth = groups.topk(2 if spec.group_top2 else 1, dim=-1).values.sum(-1)
        closed = torch.ones_like(worth).scatter(1, worth.topk(spec.top_groups).indices, 0.0).bool()
        ranked = groups.masked_fill(closed[..., None], float("-inf")).flatten(1)
    kept = torch.zeros_like(scores).scatter(1, ranked.topk(spec.top_k).indices, 1.0) * scores
    if spec.renormalize:
        kept = kept / (kept.sum(-1, keepdim=True) + 1e-20)
    return kept * spec.scale


def _sparsemixer(spec: MoeSpec, logits: Tensor) -> Tensor:
    weights, left = torch.zeros_like(logits), logits
    for _ in range(spec.top_k):
        best, at = left.max(-1, keepdim=True)
        near = (best - logits) / torch.maximum(logits.abs(), best) <= 2 * spec.jitter
        share = left.masked_fill(~near, float("-inf")).softmax(-1)
        weights = weights.scatter(1, at, share.gather(1, at))
        left = left.scatter(1, at, float("-inf"))
    return weights * spec.scale


def _expert(spec: MoeSpec, of: ExpertWeights, expert: int, x: Tensor) -> Tensor:
    gate_up, down = expert_values(of, expert)
    both = F.linear(_rounded(x, of), gate_up)
    if of.gate_up_bias is not None:
        both = both + of.gate_up_bias[expert].float()
    if not of.gated:
        given = F.linear(_rounded(F.relu(both).square(), of), down)
        return given if of.down_bias is None else given + of.down_bias[expert].float()
    gate, up = both.chunk(2, dim=-1)
    if spec.limit:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        inner = (up + 1) * gate * torch.sigmoid(SLOPE * gate)
    else:
        inner = F.silu(gate) * up
    given = F.linear(_rounded(inner, of), down)
    return given if of.down_bias is None else given + of.down_bias[expert].float()


def expert_values(of: ExpertWeights, expert: int) -> tuple[Tensor, Tensor]:
    """The numbers of an expert: gate above up `[2F, H]`, each in blocks of its own, and down `[H, F]`; fp32."""
    gate_up, down = of.gate_up[expert], of.down[expert]
    if of.gate_up_scale is None or of.down_scale is None:
        return gate_up.float(), down.float()
    if of.kind in ("mxfp4", "nvfp4"):
        up, wide = (None if each is None else each[expert] for each in (of.gate_up_factor, of.down_factor))
        return (
            fp4_expert_values(gate_up, of.gate_up_scale[expert], up),
            fp4_expert_values(down, of.down_scale[expert], wide),
        )
    if of.in_integers:
        decoded = int4_expert_values if of.kind == "int4" else int8_expert_values
        up = of.gate_up_scale[expert]
        return decoded(gate_up, up, of.group), decoded(down, of.down_scale[expert], of.group)
    parts = 2 if of.gated else 1
    halves = zip(gate_up.chunk(parts), of.gate_up_scale[expert].chunk(parts), strict=True)
    return torch.cat([_values(*half, of) for half in halves]), _values(down, of.down_scale[expert], of)


def _values(data: Tensor, scale: Tensor, of: ExpertWeights) -> Tensor:
    if of.kind in ("fp8_channel", "int8_channel"):
        return data.float() * scale[:, None]
    return fp8_values(LinearWeight(data, scale, "fp8_block"))


def _rounded(x: Tensor, of: ExpertWeights) -> Tensor:
    """Activations as experts in FP8 or INT8 read them."""
    if of.takes_int8:
        return as_int8_reads(x)
    return as_fp8_reads(x) if of.takes_quantized else x
