"""The decoder once more, as plainly as PyTorch can say it: the oracle that a benchmark checks its own tokens against.

One dense causal pass over whole sequences: no pages, no cache, no kernels of ours, float32 throughout, weights
widened layer by layer so that a second copy of the model never exists.
Invariants: shares only the weights with the engine; a wrong kernel, page or position shows as a differing token.
Knows nothing of batches or speed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.quant import AnyWeight, IntegerWeight, dequantize, quantize_fp8
from stoker_runtime.models.decoder_weights import DecoderWeights, LayerWeights
from stoker_runtime.models.rope import rope_table
from stoker_runtime.models.spec import ModelSpec

HEAD_ROWS = 16384


def reference_logits(spec: ModelSpec, weights: DecoderWeights, ids: list[int], first: int) -> Tensor:
    """Logits `[len(ids) - first, V]` fp32 of positions `first…` of one sequence."""
    device = weights.embed.device
    tokens = torch.tensor(ids, device=device)
    hidden = weights.embed[tokens].float()
    table = rope_table(spec.rope, len(ids), device)[: len(ids)]
    for index, layer in enumerate(weights.layers):
        hidden = hidden + _attention(spec, layer, _norm(hidden, layer.input_norm, spec.eps), table, spec.windows[index])
        hidden = hidden + _feed_forward(spec, layer, _norm(hidden, layer.post_norm, spec.eps))
    hidden = _norm(hidden[first:], weights.final_norm, spec.eps)
    rows = [
        hidden @ weights.head.data[at : at + HEAD_ROWS].float().t()
        for at in range(0, weights.head.out_features, HEAD_ROWS)
    ]
    return torch.cat(rows, dim=1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _linear(x: Tensor, weight: AnyWeight, bias: Tensor | None) -> Tensor:
    """A product by definition; an FP8 weight takes activations quantized per token, as its definition says."""
    if isinstance(weight, IntegerWeight):
        placed = x if weight.order is None else x[:, weight.order.long()]
        value = dequantize_integers(weight, weight.scale.dtype).float()
        return F.linear(placed, value, None if bias is None else bias.float())
    wide = weight.data if weight.kind == "dense" else dequantize(weight)
    if weight.kind != "dense":
        quantized = quantize_fp8(x.to(torch.bfloat16))
        x = quantized.data.float() * quantized.scale
    return F.linear(x, wide.float(), None if bias is None else bias.float())


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate `x [T, heads, D]` by halves; `table [T, rot]` holds cos, then sin."""
    half = table.shape[1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _attention(spec: ModelSpec, layer: LayerWeights, x: Tensor, table: Tensor, window: int) -> Tensor:
    count = x.shape[0]
    qkv = _linear(x, layer.qkv, layer.qkv_bias).view(count, -1, spec.head_dim)
    q, k, v = qkv.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(q, layer.q_norm, spec.eps), _norm(k, layer.k_norm, spec.eps)
    group = spec.heads // spec.kv_heads
    q, k = _rotate(q, table), _rotate(k, table)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    at = torch.arange(count, device=x.device)
    seen = at[None, :] <= at[:, None]
    if window:
        seen &= at[:, None] - at[None, :] < window
    heads = []
    for head in range(spec.heads):
        scores = (q[:, head] @ k[:, head].t()) * spec.attention_scale
        heads.append(torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v[:, head])
    return _linear(torch.cat(heads, dim=1), layer.output, layer.output_bias)


def _feed_forward(spec: ModelSpec, layer: LayerWeights, x: Tensor) -> Tensor:
    gate, up = _linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    if spec.activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if spec.activation == "gelu_tanh" else "none")
    return _linear(gate * up, layer.down, layer.down_bias)
