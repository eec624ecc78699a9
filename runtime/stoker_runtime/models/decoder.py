"""The one decoder: grouped-query attention and a gated feed-forward, for every architecture of the table.

Invariants: `forward` reads its inputs and the KV cache and nothing else; it neither waits for the device nor
branches on values, so a CUDA graph may capture it. The residual stream is updated in place by the fused
add-and-norm; of the last layer only the sampled rows go beyond attention.
Knows nothing of requests, of sampling, of pages' owners, or of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stoker_kernels.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from stoker_kernels.attention import paged_attention
from stoker_kernels.embedding import embed
from stoker_kernels.gemm import linear
from stoker_kernels.norm import add_rms_norm, rms_norm
from stoker_kernels.rope import qk_norm_rope_kv_write
from stoker_runtime.executor.inputs import ForwardInputs
from stoker_runtime.models.rope import rope_table
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.layout import DecoderWeights, LayerWeights

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}


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
        self._activation = ACTIVATIONS[spec.activation]

    def forward(self, inputs: ForwardInputs, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states after the final norm of the rows to sample: `[S, H]`, model dtype. Writes the KV cache."""
        eps = self.spec.eps
        layers = self.weights.layers
        residual = embed(inputs.ids, self.weights.embed)
        hidden = rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            hidden = self._attend(index, layer, hidden, inputs, kv[index])
            if last and inputs.logits_rows is not None:
                hidden = hidden.index_select(0, inputs.logits_rows)
                residual = residual.index_select(0, inputs.logits_rows)
            hidden = linear(hidden, layer.output, bias=layer.output_bias)
            hidden = add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = self._feed_forward(layer, hidden)
            next_norm = self.weights.final_norm if last else layers[index + 1].input_norm
            hidden = add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[S, H]` → `[S, V]` in the model's dtype."""
        return linear(hidden, self.weights.head)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        inputs: ForwardInputs,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """`[T, H]` → the heads' outputs side by side `[T, Hq·D]`, before the output projection."""
        spec = self.spec
        k_cache, v_cache = cache
        scale = self._unit_scale if k_cache.dtype == torch.float8_e4m3fn else None
        query = qk_norm_rope_kv_write(
            linear(hidden, layer.qkv, bias=layer.qkv_bias),
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
            k_scale=scale,
            v_scale=scale,
        )
        output = paged_attention(
            query,
            k_cache,
            v_cache,
            inputs.attention,
            scale=spec.attention_scale,
            window=spec.windows[index],
            k_scale=scale,
            v_scale=scale,
        )
        return output.view(output.shape[0], spec.q_size)

    def _feed_forward(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate_up = linear(hidden, layer.gate_up, bias=layer.gate_up_bias)
        return linear(self._activation(gate_up), layer.down, bias=layer.down_bias)
