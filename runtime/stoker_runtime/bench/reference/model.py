"""The decoder once more, as plainly as PyTorch can say it: the oracle that a benchmark checks its own tokens against.

One dense causal pass over whole sequences: no pages, no cache, no kernels of ours, float32 throughout, weights
widened layer by layer so that a second copy of the model never exists.
Invariants: shares only the weights with the engine, none of its tables, packings or roundings; a wrong kernel, page or
position shows as a differing token.
Knows nothing of batches or speed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker_kernels.quant import AnyWeight
from stoker_runtime.bench.reference.adapter import AdaptedWeight
from stoker_runtime.bench.reference.latent import latent_heads
from stoker_runtime.bench.reference.mixture import mixture
from stoker_runtime.bench.reference.rotary import rotations
from stoker_runtime.bench.reference.rounding import NONE, Rounding
from stoker_runtime.bench.reference.state import state_heads
from stoker_runtime.bench.reference.weights import as_read, parts_of, rows_of, values_of
from stoker_runtime.models.decoder_weights import DecoderWeights, LayerWeights
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.spec import ModelSpec, Norm, QkNorm

HEAD_ROWS = 16384


def reference_logits(
    spec: ModelSpec,
    weights: DecoderWeights,
    ids: list[int],
    first: int,
    *,
    longest: int = 0,
    rounding: Rounding = NONE,
) -> Tensor:
    """Logits `[len(ids) - first, V]` fp32 of positions `first…` of one sequence.

    `longest`: the longest context that the model runs with, by which some rotary scalings choose; 0: this one.
    `rounding`: what is rounded on purpose, for how far that alone moves the result.
    """
    rounding.begin()
    device = weights.embed.device
    tokens = torch.tensor(ids, device=device)
    hidden = rows_of(weights.embed, tokens).float() * spec.embedding_multiplier
    if weights.positions is not None:
        hidden = hidden + weights.positions[: len(ids)].float()
    if weights.embed_norm is not None:
        hidden = _norm(spec, hidden, weights.embed_norm, weights.embed_norm_bias)
    tables: dict[RopeSpec, Tensor] = {}
    for index, layer in enumerate(weights.layers):
        rope = spec.rope_of(index)
        if rope not in tables:
            tables[rope] = rotations(rope, len(ids), longest or len(ids), device)
        bias = _bias(spec, index, len(ids)).to(device)
        hidden = rounding.rounded(_layer(spec, layer, hidden, tables[rope], bias, rounding))
    hidden = _norm(spec, hidden[first:], weights.final_norm, weights.final_norm_bias)
    read = as_read(hidden, weights.head)
    rows = [read @ part.float().t() for part in parts_of(weights.head, HEAD_ROWS)]
    logits = torch.cat(rows, dim=1)
    if weights.head_bias is not None:
        logits = logits + weights.head_bias.float()
    logits = _capped(logits * spec.logit_scale, spec.logit_softcap)
    logits[:, list(spec.unused_tokens)] = float("-inf")
    return logits


def _bias(spec: ModelSpec, index: int, count: int) -> Tensor:
    """What is added to the scores of a layer, by head, query and key, `[heads or 1, count, count]`: −∞ where unseen."""
    at = torch.arange(count)
    behind = at[:, None] - at[None, :]
    seen = (behind >= 0)[None]
    if window := spec.windows[index]:
        seen = seen & (behind < window)
    if spec.sparse is not None and index in spec.sparse.layers:
        block, head = at // spec.sparse.block, torch.arange(spec.heads)[:, None, None]
        strided = (block[None, None, :] + 1 + head * spec.sparse.step) % spec.sparse.stride == 0
        seen = seen & (strided | (block[:, None] - block[None, :] < spec.sparse.local))
    distance = torch.tensor(spec.slopes or (0.0,))[:, None, None] * -behind
    return distance.masked_fill(~seen, float("-inf"))


def _layer(
    spec: ModelSpec, layer: LayerWeights, hidden: Tensor, table: Tensor, bias: Tensor, rounding: Rounding
) -> Tensor:
    """The residual stream after one layer; `rounding` is of its router."""
    scale, read = spec.residual_multiplier, _norm(spec, hidden, layer.input_norm, layer.input_norm_bias)
    if layer.qkv is None:
        return hidden + scale * _feed_forward(spec, layer, read, rounding)
    attended = _attention(spec, layer, read, table, bias)
    if not layer.feeds:
        return hidden + scale * attended
    if spec.parallel:
        if layer.ffn_norm is not None:
            read = _norm(spec, hidden, layer.ffn_norm, layer.ffn_norm_bias)
        return hidden + attended + _feed_forward(spec, layer, read, rounding)
    hidden = hidden + scale * _norm(spec, attended, layer.attention_post_norm, None)
    fed = _feed_forward(spec, layer, _norm(spec, hidden, layer.ffn_norm, layer.ffn_norm_bias), rounding)
    return hidden + scale * _norm(spec, fed, layer.ffn_post_norm, None)


def _norm(spec: ModelSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """By the kind of the model's norms; x itself where there is none."""
    if weight is None:
        return x
    if spec.norm is Norm.LAYER:
        x = x - x.mean(-1, keepdim=True)
    normed = _rms(x, weight, spec.eps)
    return normed if bias is None else normed + bias.float()


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _capped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap if cap else x


def _linear(x: Tensor, weight: AnyWeight | AdaptedWeight, bias: Tensor | None) -> Tensor:
    """A product by definition: of what is left of activations after they were rounded as the weight's kind says."""
    if isinstance(weight, AdaptedWeight):
        return _linear(x, weight.base, bias) + weight.added(x)
    return F.linear(as_read(x, weight), values_of(weight).float(), None if bias is None else bias.float())


def _rotate(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """Rotate `x [T, heads, D]` by halves, or by neighbours; `table [T, rot]` holds cos, then sin."""
    half = table.shape[1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else (turning[..., :half], turning[..., half:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _normed_heads(spec: ModelSpec, heads: Tensor, weight: Tensor | None) -> Tensor:
    """Queries or keys `[T, heads, D]` after the norm that the model has for them."""
    if weight is None:
        return heads
    if spec.qk_norm is QkNorm.WHOLE:
        return _rms(heads.flatten(1), weight, spec.eps).view_as(heads)
    if spec.qk_norm is QkNorm.LAYER:
        heads = heads - heads.mean(-1, keepdim=True)
    return _rms(heads, weight, spec.eps)


def _attention(spec: ModelSpec, layer: LayerWeights, x: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    count = x.shape[0]
    assert layer.qkv is not None, "a layer that feeds forward alone attends to nothing"
    assert layer.output is not None, "a layer that feeds forward alone attends to nothing"
    projected = _linear(x, layer.qkv, layer.qkv_bias)
    if layer.state is not None and layer.state.gates is not None:
        projected = torch.cat((projected, _linear(x, layer.state.gates, None)), dim=1)
    if layer.state is not None and spec.recurrent is not None:
        return _linear(state_heads(spec.recurrent, layer.state, projected, spec.eps), layer.output, layer.output_bias)
    if layer.latent is not None:
        interleaved = spec.rope.interleaved
        seen = latent_heads(spec, layer.latent, projected, _linear, lambda each: _rotate(each, table, interleaved))
        return _linear(seen, layer.output, layer.output_bias)
    qkv = projected.view(count, -1, spec.head_dim)
    q, k, v, *gates = qkv.split((spec.heads, *(spec.kv_heads,) * 2, *(spec.heads,) * spec.attention_gate), dim=1)
    late, group = spec.qk_norm is QkNorm.ROTATED, spec.heads // spec.kv_heads
    if not late:
        q, k = _normed_heads(spec, q, layer.q_norm), _normed_heads(spec, k, layer.k_norm)
    q, k = (_rotate(each, table, spec.rope.interleaved) for each in (q, k))
    if late:
        q, k = _normed_heads(spec, q, layer.q_norm), _normed_heads(spec, k, layer.k_norm)
    if growth := spec.rope.query_growth:
        lengths = [1 + at // spec.rope.original_max_position for at in range(count)]
        q = q * (1 + growth * torch.tensor(lengths, device=q.device).log())[:, None, None]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    heads = []
    for head in range(spec.heads):
        scores = _capped((q[:, head] @ k[:, head].t()) * spec.attention_scale, spec.attention_softcap)
        scores = scores + bias[head % len(bias)]
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks[head].expand(count, 1)), dim=1)
        heads.append(torch.softmax(scores, dim=-1)[:, :count] @ v[:, head])
    gate = torch.sigmoid(gates[0].flatten(1)) if gates else 1.0
    return _linear(torch.cat(heads, dim=1) * gate, layer.output, layer.output_bias)


def _feed_forward(spec: ModelSpec, layer: LayerWeights, x: Tensor, rounding: Rounding) -> Tensor:
    if layer.mixture is not None and spec.moe is not None:
        shared = None if layer.gate_up is None else _dense(spec, layer, x)
        return mixture(spec.moe, layer.mixture, x, shared, rounding)
    return _dense(spec, layer, x)


def _dense(spec: ModelSpec, layer: LayerWeights, x: Tensor) -> Tensor:
    assert layer.gate_up is not None, "a layer has experts or a feed-forward of its own"
    assert layer.down is not None, "a layer has experts or a feed-forward of its own"
    both = _linear(x, layer.gate_up, layer.gate_up_bias)
    if not spec.gated:
        return _linear(_activate(spec, both), layer.down, layer.down_bias)
    gate, up = both.chunk(2, dim=-1)
    if spec.activation == "clamped_gelu":
        most = spec.activation_limit or float("inf")
        gate, up = gate.clamp(max=most), up.clamp(-most, most)
        return _linear(gate / (1 + torch.exp(-1.702 * gate)) * (1 + up), layer.down, layer.down_bias)
    return _linear(_activate(spec, gate) * up, layer.down, layer.down_bias)


def _activate(spec: ModelSpec, x: Tensor) -> Tensor:
    if spec.activation == "silu":
        return F.silu(x)
    if spec.activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if spec.activation == "gelu_tanh" else "none")
