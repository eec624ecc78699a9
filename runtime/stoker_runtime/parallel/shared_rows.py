"""The pass of a long prompt over ranks that share out its rows: what a layer gives is summed and normed by the owner of
each row, while products of other rows run.

Products whose sums count are made for the other ranks' rows first, those that read what was normed for the own rows
first; in between is what is copied. A mixture of experts needs all rows at once. Of the last layer only the sampled
rows go beyond attention, by the ordinary way.
Invariants: the values are those of `RankDecoder.forward`; all ranks come to the same choice.
Knows nothing of how rows are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from stoker_kernels.all_reduce import LEAST_SHARE, RowShares, Share
from stoker_kernels.quant import AnyWeight
from stoker_runtime.config import EngineConfig
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.decoder_weights import LayerWeights
from stoker_runtime.models.inputs import ForwardInputs
from stoker_runtime.models.spec import ModelSpec, Norm
from stoker_runtime.parallel.stream import reads_fp8

# What a layer whose rows are shared out costs the host, and what products of many rows reach.
LAYER_SECONDS = 1.2e-3
FLOPS, FLOPS_8_BITS = 700e12, 1200e12
PIECES = 2  # of a share whose product is as short as what is copied beside it


def shares_rows(spec: ModelSpec) -> bool:
    """Whether the layers are of the kind whose rows can be shared out: attention, then a feed-forward, each behind a
    norm of the whole stream.
    """
    plain = spec.norm is Norm.RMS and spec.pre_norms and not spec.post_norms and spec.residual_multiplier == 1.0
    return plain and not spec.parallel and spec.recurrent is None


def shared_tokens(spec: ModelSpec, config: EngineConfig) -> range:
    """The steps whose rows ranks share out, by their tokens: those that take GPUs longer than the host, which launches
    twice as much as for other steps. None where the layers are of another kind.
    """
    if not shares_rows(spec):
        return range(0)
    ranks = config.tensor_parallel_size
    parameters = spec.active_parameters // ranks
    rate = FLOPS_8_BITS if config.quantization.startswith("fp8") else FLOPS
    hidden_by_gpu = math.ceil(spec.num_layers * LAYER_SECONDS * rate / (2 * max(parameters, 1)))
    return range(max(ranks * LEAST_SHARE, hidden_by_gpu), config.max_num_batched_tokens + 1)


def shares_for(inputs: ForwardInputs, dtype: torch.dtype, exchange: RowShares) -> tuple[Share, ...]:
    """Whose rows of a step are whose; () where it goes the ordinary way."""
    beside = (inputs.adapters, inputs.taps, inputs.images)
    if inputs.logits_rows is None or any(each is not None for each in beside):
        return ()
    return exchange.shares(len(inputs.ids), dtype)


class SharedRows:
    """One step's pass."""

    def __init__(
        self, decoder: Decoder, exchange: RowShares, shares: Sequence[Share], total: Callable[[Tensor], Tensor]
    ) -> None:
        """`total` sums a few rows over the ranks, in place."""
        self._decoder, self._exchange, self._total = decoder, exchange, total
        self._outgoing, self._incoming = exchange.outgoing(shares), exchange.incoming(shares)
        self._own, self._tokens = self._incoming[0], sum(map(len, shares))

    def forward(self, inputs: ForwardInputs, kv: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """As `Decoder.forward`."""
        decoder, layers = self._decoder, self._decoder.weights.layers
        residual = decoder._enter(inputs)
        own = residual[self._own.rows]
        hidden = decoder._stream.enter(residual, layers[0])
        projected = decoder._linear(hidden, _there(layers[0].qkv), layers[0].qkv_bias)
        for index, (layer, following) in enumerate(pairwise(layers)):
            self._give_heads(layer, decoder._attend(index, projected, inputs, kv[index]))
            self._norm(own, layer.ffn_norm, layer.ffn_reader)
            self._feed(index, layer, inputs.slot_mapping)
            self._norm(own, following.input_norm, following.reader)
            projected = self._project(own, following)
        return self._last(decoder._attend(len(layers) - 1, projected, inputs, kv[-1]), residual, inputs)

    def _give_heads(self, layer: LayerWeights, heads: Tensor) -> None:
        # The product is as short as what is copied beside it: copies begin in the middle of a share.
        for share in self._outgoing:
            for rows in share.pieces(1 if share is self._own else PIECES):
                update = self._decoder._linear(heads[rows], _there(layer.output), layer.output_bias)
                self._exchange.give(share, update, rows.start - share.start)

    def _feed(self, index: int, layer: LayerWeights, slots: Tensor) -> None:
        """Read what was normed; give what the feed-forward makes of it."""
        decoder, exchange = self._decoder, self._exchange
        if layer.mixture is not None:
            update = decoder._feed(index, self._whole(), slots, None)
            for share in self._outgoing:
                exchange.give(share, update[share.rows])
            return
        gated = {share.owner: decoder._gated(layer, exchange.rows(share)) for share in self._incoming}
        for share in self._outgoing:
            exchange.give(share, decoder._linear(gated.pop(share.owner), _there(layer.down), layer.down_bias))

    def _norm(self, own: Tensor, norm: Tensor | None, consumer: AnyWeight | None) -> None:
        assert norm is not None, "rows are shared out of layers that norm what they read"
        eps = self._decoder.spec.eps
        self._exchange.sum_add_rms_norm(self._own, own, norm, eps, quantized=reads_fp8(consumer))

    def _project(self, own: Tensor, layer: LayerWeights) -> Tensor:
        """What a layer's attention reads of all rows, in the type of the stream's `own` ones."""
        weight = _there(layer.qkv)
        projected = own.new_empty((self._tokens, weight.out_features))
        for share in self._incoming:
            self._decoder._linear(self._exchange.rows(share), weight, layer.qkv_bias, projected[share.rows])
        return projected

    def _whole(self) -> Tensor:
        """All rows of what a router reads, which is the model's type."""
        for share in self._incoming:
            self._exchange.rows(share)
        return self._exchange.all_rows(self._tokens)

    def _last(self, heads: Tensor, residual: Tensor, inputs: ForwardInputs) -> Tensor:
        """From the last layer's heads on: the hidden states of the sampled rows."""
        decoder, rows = self._decoder, inputs.logits_rows
        assert rows is not None, "a step whose rows are shared out has rows that are sampled"
        mine = (rows >= self._own.start) & (rows < self._own.stop)
        stream = torch.where(mine.unsqueeze(1), residual.index_select(0, rows), 0)
        self._total(stream)
        picked, slots = heads.index_select(0, rows), inputs.slot_mapping.index_select(0, rows)
        layer = len(decoder.weights.layers) - 1
        update, beside = decoder._beyond_attention(layer, picked, picked, stream, slots, None)
        return decoder._leave(update, stream, beside)


def _there(weight: AnyWeight | None) -> AnyWeight:
    assert weight is not None, "a layer that attends, and one that feeds, has the product"
    return weight
