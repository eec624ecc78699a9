"""The forward pass of a head that drafts: pairs of a token and the state of the token before it.

Invariants: those of `Decoder`; the states that are handed in are overwritten.
Knows nothing of where states are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker_kernels.norm import rms_norm
from stoker_kernels.quant import LinearWeight, Quantized
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.decoder_weights import DecoderWeights, LayerWeights
from stoker_runtime.models.draft_heads.spec import HeadSpec
from stoker_runtime.models.inputs import AdapterInputs, ForwardInputs


class HeadDecoder(Decoder):
    """A head on one device, beside the model `target`."""

    def __init__(
        self,
        spec: HeadSpec,
        weights: DecoderWeights,
        target: Decoder,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_model_len: int,
    ) -> None:
        """`target` lends its embedding where the head has none."""
        super().__init__(spec, weights, device, dtype, max_model_len=max_model_len)
        self._head = spec
        self._target = target

    def fuse(self, states: Tensor) -> Tensor:
        """`[T, taps · state]` of the model → `[T, H]`."""
        weight = self.weights.fuse
        assert weight is not None, "a head fuses what it reads of the model"
        return self._linear(states, weight, None)

    def forward_pairs(
        self, inputs: ForwardInputs, states: Tensor, kv: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor]:
        """Tokens `[T]`, each with a state `[T, H]` → what the output head reads `[S, H]`, and the states that follow.

        Writes the KV cache; `states` are overwritten.
        """
        layer = self.weights.layers[0]
        read, residual = self._begin(inputs, states, layer)
        heads, slots = self._mix(0, read, inputs, kv[0]), inputs.slot_mapping
        assert heads is not None, "a head attends"
        assert layer.output is not None, "a head attends"
        if inputs.logits_rows is not None:
            heads = heads.index_select(0, inputs.logits_rows)
            residual = residual.index_select(0, inputs.logits_rows)
            slots = slots.index_select(0, inputs.logits_rows)
        update = self._linear(heads, layer.output, layer.output_bias)
        hidden = self._stream.to_ffn(update, residual, layer)
        last = self._leave(self._feed(0, hidden, slots, None), residual, None)
        return last, residual

    def _begin(self, inputs: ForwardInputs, states: Tensor, layer: LayerWeights) -> tuple[Tensor | Quantized, Tensor]:
        """What attention reads, and the residual stream."""
        pairs, normed = self._side_by_side(inputs, states, layer.input_norm, layer.hidden_norm)
        return pairs, normed if self._head.norm_first else states

    def _side_by_side(
        self, inputs: ForwardInputs, states: Tensor, first: Tensor | None, second: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`[T, 2H]`, the embeddings and the states, each normed; and the latter alone."""
        assert first is not None, "a head norms the embedding"
        assert second is not None, "a head norms the state"
        normed = rms_norm(states, second, self.spec.eps)
        return torch.cat((rms_norm(self._embedded(inputs), first, self.spec.eps), normed), dim=1), normed

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        return (self if self._head.own_table else self._target).token_rows(inputs.ids)


class NextDecoder(HeadDecoder):
    """A model's own layer for the token after the next, which reads and writes the model's vocabulary."""

    def forward_pairs(
        self, inputs: ForwardInputs, states: Tensor, kv: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor]:
        """As `HeadDecoder.forward_pairs`; the states that follow stand behind the last norm, as the model's do."""
        last, _ = super().forward_pairs(inputs, states, kv)
        return last, last

    def logits(self, hidden: Tensor, out: Tensor | None = None, adapters: AdapterInputs | None = None) -> Tensor:
        """By the model's head."""
        return self._target.logits(hidden, out, adapters)

    def _begin(self, inputs: ForwardInputs, states: Tensor, layer: LayerWeights) -> tuple[Tensor | Quantized, Tensor]:
        assert layer.join is not None, "embedding and state are joined"
        pairs, _ = self._side_by_side(inputs, states, layer.embed_norm, layer.hidden_norm)
        stream = self._linear(pairs, LinearWeight(layer.join, None, "dense"), None)
        return self._stream.enter(stream, layer), stream
