"""The one encoder: full attention with absolute positions, for every architecture of the encoders' table.

Invariants: `forward` reads its inputs and nothing else; sequences of a batch lie end to end and do not see each
other, so a text's states depend on the text alone.
Knows nothing of requests, of pooling, or of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.activation import gelu, gelu_tanh, relu, silu
from stoker_kernels.bidirectional import bidirectional_attention
from stoker_kernels.embedding import embed
from stoker_kernels.gemm import linear
from stoker_kernels.norm import layer_norm
from stoker_kernels.quant import LinearWeight
from stoker_runtime.models.encoder_spec import EncoderSpec

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "silu": silu}


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """`T` tokens of `S` texts, end to end: `ids`, `positions`, `types` `[T]` int32, `starts [S + 1]` int32."""

    ids: Tensor
    positions: Tensor
    types: Tensor
    starts: Tensor


class Encoder:
    """A model on one device. `weights` holds every tensor of `spec.tensors`, by name."""

    def __init__(self, spec: EncoderSpec, weights: dict[str, Tensor]) -> None:
        self.spec = spec
        self._weights = weights

    def forward(self, inputs: EncoderInputs) -> Tensor:
        """The states of all tokens: `[T, H]`, model dtype."""
        spec, weights = self.spec, self._weights
        words = embed(inputs.ids, weights["word"])
        words += embed(inputs.types, weights["type"])
        hidden = self._norm(words, embed(inputs.positions, weights["position"]), "embed_norm")
        for layer in range(spec.num_layers):
            name = f"layers.{layer}"
            qkv = self._linear(hidden, f"{name}.qkv")
            q, k, v = (part.unflatten(1, (spec.heads, spec.head_dim)) for part in qkv.split(spec.hidden, dim=1))
            seen = bidirectional_attention(q, k, v, inputs.starts, scale=spec.head_dim**-0.5)
            hidden = self._norm(self._linear(seen.flatten(1), f"{name}.output"), hidden, f"{name}.attention_norm")
            wide = self._linear(hidden, f"{name}.up")
            wide = ACTIVATIONS[spec.activation](wide, out=wide)
            hidden = self._norm(self._linear(wide, f"{name}.down"), hidden, f"{name}.ffn_norm")
        return hidden

    def scores(self, first: Tensor) -> Tensor:
        """First tokens' states `[S, H]` through the classification head: `[S, 1]`."""
        return self._linear(torch.tanh(self._linear(first, "head_dense")), "head_out")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, LinearWeight(self._weights[name]), bias=self._weights[f"{name}_bias"])

    def _norm(self, update: Tensor, residual: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[name], self._weights[f"{name}_bias"]
        return layer_norm(update, weight, bias, self.spec.eps, residual=residual, out=update)
