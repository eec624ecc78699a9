"""The one decoder: grouped-query attention and a gated feed-forward, for every architecture of the table.

Invariants: `forward` reads its inputs and the KV cache and nothing else; it neither waits for the device nor
branches on values, so a CUDA graph may capture it. The residual stream is updated in place by the fused
add-and-norm; of the last layer only the sampled rows go beyond attention.
Knows nothing of requests, of sampling, of pages' owners, or of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul, silu_and_mul_quant
from stoker_kernels.attention import paged_attention
from stoker_kernels.embedding import embed
from stoker_kernels.gemm import linear, linear_silu_mul
from stoker_kernels.norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from stoker_kernels.quant import AnyWeight, LinearWeight, Quantized
from stoker_kernels.rope import qk_norm_rope_kv_write
from stoker_runtime.models.decoder_weights import DecoderWeights, LayerWeights
from stoker_runtime.models.inputs import ForwardInputs
from stoker_runtime.models.rope import rope_table
from stoker_runtime.models.spec import ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}
# Fused with quantization for an fp8 consumer; where there is none, `linear` quantizes its input itself.
QUANTIZING_ACTIVATIONS: dict[str, Callable[[Tensor], Quantized]] = {"silu": silu_and_mul_quant}


class Decoder:
    """A model on one device. `kv` of `forward` is one `(k_cache, v_cache)` per layer, `[P, Hkv, B, D]` each."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_model_len: int = 0,
    ) -> None:
        """`max_model_len` is the longest context that will run (0: `spec.max_position`); it sizes the rotary table."""
        self.spec = spec
        self.weights = weights
        self.dtype = dtype
        self._cos_sin = rope_table(spec.rope, max_model_len or spec.max_position, device)
        # Keys and values are of order one, so fp8 caches without calibrated scales use 1.
        self._unit_scale = torch.ones(spec.kv_heads, dtype=torch.float32, device=device)

    def of_layers(self, layers: Sequence[int]) -> Decoder:
        """The same model with these layers alone, in this order: same memory, other results."""
        few = copy(self)
        windows = tuple(self.spec.windows[index] for index in layers)
        few.spec = replace(self.spec, num_layers=len(layers), windows=windows)
        scales = self.weights.kv_scales
        few.weights = replace(
            self.weights,
            layers=tuple(self.weights.layers[index] for index in layers),
            kv_scales=None if scales is None else scales[list(layers)],
        )
        return few

    def unlike_layers(self) -> list[int]:
        """Layers that stand for all: the first of each kind with its successor, which norms in the form it reads."""
        first: dict[tuple[object, ...], int] = {}
        for index, layer in enumerate(self.weights.layers):
            linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
            first.setdefault((self.spec.windows[index], *(linear.kind for linear in linears)), index)
        successors = (min(index + 1, len(self.weights.layers) - 1) for index in first.values())
        return sorted({*first.values(), *successors})

    def forward(self, inputs: ForwardInputs, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states of the sampled rows after the final norm: `[S, H]`, model dtype. Writes the KV cache."""
        layers = self.weights.layers
        residual = embed(inputs.ids, self.weights.embed)
        hidden = self._first_norm(residual)
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            heads = self._attend(index, hidden, inputs, kv[index])
            if last and inputs.logits_rows is not None:
                heads = heads.index_select(0, inputs.logits_rows)
                residual = residual.index_select(0, inputs.logits_rows)
            update = self._linear(heads, layer.output, layer.output_bias)
            hidden = self._add_norm(update, residual, layer.post_norm, layer.gate_up)
            update = self._feed_forward(layer, hidden)
            if not last:
                following = layers[index + 1]
                hidden = self._add_norm(update, residual, following.input_norm, following.qkv)
        return add_rms_norm(update, residual, self.weights.final_norm, self.spec.eps)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[S, H]` → `[S, V]` in the model's dtype; `out` is written and returned where it is given."""
        return linear(hidden, self.weights.head, out=out)

    def _first_norm(self, hidden: Tensor) -> Tensor | Quantized:
        first = self.weights.layers[0]
        if first.qkv.takes_quantized:
            return rms_norm_quant(hidden, first.input_norm, self.spec.eps)
        return rms_norm(hidden, first.input_norm, self.spec.eps)

    def _add_norm(self, update: Tensor, residual: Tensor, norm: Tensor, consumer: AnyWeight) -> Tensor | Quantized:
        """Add `update` to the residual stream in place and norm it in the form that `consumer` reads."""
        if consumer.takes_quantized:
            return add_rms_norm_quant(update, residual, norm, self.spec.eps)
        return add_rms_norm(update, residual, norm, self.spec.eps)

    def _linear(self, x: Tensor | Quantized, weight: AnyWeight, bias: Tensor | None) -> Tensor:
        if isinstance(x, Quantized):
            # Quantized input has lost the model's dtype; the output's place says it again.
            out = torch.empty((x.data.shape[0], weight.out_features), dtype=self.dtype, device=weight.data.device)
            return linear(x, weight, bias=bias, out=out)
        return linear(x, weight, bias=bias)

    def _attend(
        self,
        index: int,
        hidden: Tensor | Quantized,
        inputs: ForwardInputs,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """`[T, H]` → the heads' outputs side by side `[T, Hq·D]`, before the output projection."""
        spec = self.spec
        layer = self.weights.layers[index]
        k_cache, v_cache = cache
        k_scale, v_scale = self._cache_scales(index, k_cache)
        query = qk_norm_rope_kv_write(
            self._linear(hidden, layer.qkv, layer.qkv_bias),
            inputs.positions,
            inputs.slot_mapping,
            self._cos_sin,
            k_cache,
            v_cache,
            num_q_heads=spec.heads,
            num_kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=spec.eps,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        output = paged_attention(
            query,
            k_cache,
            v_cache,
            inputs.attention,
            scale=spec.attention_scale,
            window=spec.windows[index],
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return output.view(output.shape[0], spec.q_size)

    def _cache_scales(self, index: int, cache: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What the keys and the values of layer `index` are multiplied by, `[Hkv]` each; only e4m3 has scales."""
        if cache.dtype != torch.float8_e4m3fn:
            return None, None
        if self.weights.kv_scales is None:
            return self._unit_scale, self._unit_scale
        k_scale, v_scale = self.weights.kv_scales[index]
        return k_scale, v_scale

    def _feed_forward(self, layer: LayerWeights, hidden: Tensor | Quantized) -> Tensor:
        gate_up, down = layer.gate_up, layer.down
        dense = gate_up.kind == down.kind == "dense" and isinstance(hidden, Tensor)
        quantized = isinstance(hidden, Quantized) and down.takes_quantized and self.dtype == torch.bfloat16
        one_op = (dense or quantized) and self.spec.activation == "silu" and layer.gate_up_bias is None
        if one_op and isinstance(gate_up, LinearWeight):
            return self._linear(linear_silu_mul(hidden, gate_up), down, layer.down_bias)
        both = self._linear(hidden, gate_up, layer.gate_up_bias)
        fused = QUANTIZING_ACTIVATIONS.get(self.spec.activation)
        if down.takes_quantized and fused is not None:
            return self._linear(fused(both), down, layer.down_bias)
        return self._linear(ACTIVATIONS[self.spec.activation](both), down, layer.down_bias)
