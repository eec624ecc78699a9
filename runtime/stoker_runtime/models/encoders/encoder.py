"""The one encoder, for every architecture of the encoders' table: attention in both directions, without a cache.

Invariants: `forward` reads its inputs and nothing else; sequences of a batch lie end to end and do not see each
other, so a text's states depend on the text alone.
Knows nothing of requests, of pooling, or of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.activation import gelu, gelu_and_mul, gelu_tanh, gelu_tanh_and_mul, relu, silu, silu_and_mul
from stoker_kernels.bidirectional import bidirectional_attention
from stoker_kernels.embedding import embed
from stoker_kernels.gemm import linear
from stoker_kernels.norm import add_layer_norm, layer_norm
from stoker_kernels.quant import LinearWeight
from stoker_kernels.rope import qk_norm_rope_kv_write
from stoker_runtime.models.encoders.spec import EncoderSpec
from stoker_runtime.models.rope import rope_table

Activation = Callable[..., Tensor]
ACTIVATIONS: dict[str, Activation] = {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "silu": silu}
GATED: dict[str, Activation] = {"gelu": gelu_and_mul, "gelu_tanh": gelu_tanh_and_mul, "silu": silu_and_mul}


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """`T` tokens of `S` texts, end to end: `ids`, `positions`, `types` `[T]` int32, `starts [S + 1]` int32.

    `positions` begin with 0 in each text.
    """

    ids: Tensor
    positions: Tensor
    types: Tensor
    starts: Tensor


class Encoder:
    """A model on one device. `weights` holds every tensor of `spec.tensors`, by name."""

    def __init__(self, spec: EncoderSpec, weights: dict[str, Tensor]) -> None:
        self.spec = spec
        self._weights = weights
        device = weights["word"].device
        self._tables = {rope: rope_table(rope, spec.max_position, device) for rope in spec.ropes}

    def forward(self, inputs: EncoderInputs) -> Tensor:
        """The states of all tokens: `[T, H]`, model dtype."""
        spec = self.spec
        # Where a token's key and value go while they rotate: rows of their own, in the order of the tokens.
        places = torch.arange(len(inputs.ids), device=inputs.ids.device) if spec.ropes else None
        stream = normed = self._embed(inputs)
        for layer in range(spec.num_layers):
            name = f"layers.{layer}"
            seen = self._attend(self._linear(normed, f"{name}.qkv"), inputs, places, layer)
            update = self._linear(seen.flatten(1), f"{name}.output")
            stream, normed = self._add(update, stream, spec.norm_before("attention", layer))
            update = self._linear(self._activate(self._linear(normed, f"{name}.up")), f"{name}.down")
            stream, normed = self._add(update, stream, spec.norm_before("ffn", layer))
        return normed

    def scores(self, pooled: Tensor) -> Tensor:
        """Texts' states `[S, H]` through the classification head: `[S, 1]`."""
        wide = self._linear(pooled, "head_dense")
        kind = self.spec.head_activation
        wide = torch.tanh(wide) if kind == "tanh" else ACTIVATIONS[kind](wide)
        return self._linear(self._norm(wide, None, "head_norm") if self.spec.head_norm else wide, "head_out")

    def _embed(self, inputs: EncoderInputs) -> Tensor:
        spec, weights = self.spec, self._weights
        words = embed(inputs.ids, weights["word"])
        if spec.types:
            words += embed(inputs.types, weights["type"])
        if spec.rope is not None:
            return self._norm(words, None, "embed_norm")
        positions = inputs.positions + spec.position_offset
        return self._norm(words, embed(positions, weights["position"]), "embed_norm")

    def _attend(self, qkv: Tensor, inputs: EncoderInputs, places: Tensor | None, layer: int) -> Tensor:
        """What each token's heads see: `qkv [T, 3·H]` → `[T, heads, D]`."""
        spec = self.spec
        heads, dim = spec.heads, spec.head_dim
        rope = spec.rope_of(layer)
        if rope is None or places is None:
            q, k, v = (part.unflatten(1, (heads, dim)) for part in qkv.split(spec.hidden, dim=1))
        else:
            # Pages of one token: keys and values lie as attention without a cache reads them.
            keys, values = torch.empty((2, len(qkv), heads, 1, dim), dtype=qkv.dtype, device=qkv.device)
            q = qk_norm_rope_kv_write(
                qkv, inputs.positions, places, self._tables[rope], keys, values,
                num_q_heads=heads, num_kv_heads=heads, head_dim=dim, interleaved=rope.interleaved,
            )  # fmt: skip
            k, v = keys[:, :, 0], values[:, :, 0]
        return bidirectional_attention(q, k, v, inputs.starts, scale=dim**-0.5, window=spec.window_of(layer))

    def _activate(self, wide: Tensor) -> Tensor:
        if self.spec.gated:
            return GATED[self.spec.activation](wide)
        return ACTIVATIONS[self.spec.activation](wide, out=wide)

    def _add(self, update: Tensor, stream: Tensor, norm: str) -> tuple[Tensor, Tensor]:
        """(the stream with `update` added, what the next part reads)."""
        if not self.spec.pre_norm:
            normed = self._norm(update, stream, norm)
            return normed, normed
        weight, bias = self._weights[norm], self._weights.get(f"{norm}_bias")
        return stream, add_layer_norm(update, stream, weight, bias, self.spec.eps, out=update)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, LinearWeight(self._weights[name]), bias=self._weights.get(f"{name}_bias"))

    def _norm(self, update: Tensor, residual: Tensor | None, name: str) -> Tensor:
        weight, bias = self._weights[name], self._weights.get(f"{name}_bias")
        return layer_norm(update, weight, bias, self.spec.eps, residual=residual, out=update)
