"""The residual stream of a decoder: how what a layer gives is added to it, and what the next layer reads of it.

Invariants: the stream is updated in place, by the kernel that norms it where there is one; which kernel runs depends on
the spec and the weights' kinds alone. Where nothing norms what a layer reads, it reads the stream itself.
Knows nothing of attention, feed-forwards or positions.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.norm import (
    add_layer_norm,
    add_normed,
    add_rms_norm,
    add_rms_norm_quant,
    layer_norm,
    rms_norm,
    rms_norm_quant,
)
from stoker_kernels.quant import AnyWeight, Quantized, activation_type
from stoker_runtime.models.decoder_weights import DecoderWeights, LayerWeights
from stoker_runtime.models.spec import ModelSpec, Norm


class Stream:
    """How the layers of one model write to the stream `[T, H]` and read it."""

    def __init__(self, spec: ModelSpec) -> None:
        self._eps = spec.eps
        self._is_layer_norm = spec.norm is Norm.LAYER
        self._multiplier = spec.residual_multiplier

    def enter(self, stream: Tensor, layer: LayerWeights) -> Tensor | Quantized:
        """What the first layer reads."""
        if layer.input_norm is None:
            return stream
        return self._norm(stream, layer.input_norm, layer.input_norm_bias, layer.reader)

    def beside(self, stream: Tensor, layer: LayerWeights, read: Tensor | Quantized) -> Tensor | Quantized:
        """What a feed-forward reads that runs beside attention, which read `read` of the same stream."""
        if layer.ffn_norm is None:
            return read
        return self._norm(stream, layer.ffn_norm, layer.ffn_norm_bias, layer.ffn_reader)

    def to_ffn(self, update: Tensor, stream: Tensor, layer: LayerWeights) -> Tensor | Quantized:
        """Add what attention gave; what the feed-forward reads."""
        post, norm, bias = layer.attention_post_norm, layer.ffn_norm, layer.ffn_norm_bias
        return self._add(update, stream, post, norm, bias, layer.ffn_reader)

    def to_next(
        self, update: Tensor, stream: Tensor, layer: LayerWeights, following: LayerWeights, also: Tensor | None
    ) -> Tensor | Quantized:
        """Add what the feed-forward gave, and attention `also` if it ran beside; what the following layer reads."""
        norm, bias = following.input_norm, following.input_norm_bias
        return self._add(update, stream, layer.ffn_post_norm, norm, bias, following.reader, also)

    def leave(
        self, update: Tensor, stream: Tensor, layer: LayerWeights, weights: DecoderWeights, also: Tensor | None
    ) -> Tensor:
        """The last layer's: the hidden states after the final norm."""
        norm, bias = weights.final_norm, weights.final_norm_bias
        hidden = self._add(update, stream, layer.ffn_post_norm, norm, bias, None, also)
        assert isinstance(hidden, Tensor), "the head reads the model's dtype"
        return hidden

    def _norm(
        self, stream: Tensor, norm: Tensor, bias: Tensor | None, consumer: AnyWeight | None
    ) -> Tensor | Quantized:
        if self._is_layer_norm:
            return layer_norm(stream, norm, bias, self._eps)
        into = None if consumer is None else activation_type(consumer)
        if into is not None:
            return rms_norm_quant(stream, norm, self._eps, into)
        return rms_norm(stream, norm, self._eps)

    def _add(
        self,
        update: Tensor,
        stream: Tensor,
        post: Tensor | None,
        norm: Tensor | None,
        bias: Tensor | None,
        consumer: AnyWeight | None,
        also: Tensor | None = None,
    ) -> Tensor | Quantized:
        """Add `update`, normed by `post` where there is one, and norm the sum in the form that `consumer` reads."""
        if norm is None:
            assert post is not None, "a layer norms what it reads or what it gives"
            add_normed(update, stream, post, self._eps)
            return stream
        if self._is_layer_norm:
            return add_layer_norm(update, stream, norm, bias, self._eps, also=also)
        into = None if consumer is None else activation_type(consumer)
        if into is not None:
            return add_rms_norm_quant(update, stream, norm, self._eps, into, post=post, multiplier=self._multiplier)
        return add_rms_norm(update, stream, norm, self._eps, post=post, multiplier=self._multiplier)
