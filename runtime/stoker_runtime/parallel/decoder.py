"""The decoder of one rank: the same layers over its own heads and units, with sums over the ranks between.

Invariants: every rank of a stage has the same residual stream. As `Decoder`, it neither waits for the device nor
branches on values. All logits are the leader's alone; each rank of the last stage has its columns of them.
Knows nothing of how ranks exchange anything, nor of who samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.norm import mean_squares, rms_norm_by
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.inputs import AdapterInputs, ForwardInputs
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.parallel.shared_rows import SharedRows, shares_for
from stoker_runtime.parallel.stream import RankStream


class RankDecoder(Decoder):
    """One rank's part of a decoder."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_model_len: int = 0,
        collectives: Collectives,
    ) -> None:
        """`spec` and `weights` are the rank's."""
        super().__init__(spec, weights, device, dtype, max_model_len=max_model_len)
        self.collectives = collectives
        self._place = collectives.place
        self._own_unused = None if self._unused is None else self._columns(self._unused)
        self.renew(weights)
        if not spec.parallel:
            self._stream = RankStream(spec, collectives)

    def renew(self, weights: DecoderWeights) -> None:
        """As `Decoder.renew`; before the last stage nothing is normed at the end."""
        if not self._place.is_last:
            kind = torch.float32 if self.spec.norm_offset else self.dtype
            ones = torch.ones(self.spec.hidden, dtype=kind, device=weights.final_norm.device)
            weights = replace(weights, final_norm=ones)
        super().renew(weights)

    def forward(self, inputs: ForwardInputs, kv: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """As `Decoder.forward`; before the last stage what comes back has the shape alone."""
        exchange = self.collectives.row_shares
        if exchange is not None and (shares := shares_for(inputs, self.dtype, exchange)):
            return SharedRows(self, exchange, shares, self.collectives.sum).forward(inputs, kv)
        if self._place.is_last:
            return super().forward(inputs, kv)
        hidden = super().forward(replace(inputs, logits_rows=None), kv)
        return hidden if inputs.logits_rows is None else hidden[: len(inputs.logits_rows)]

    def logits(self, hidden: Tensor, out: Tensor | None = None, adapters: AdapterInputs | None = None) -> Tensor:
        """As `Decoder.logits`; where this rank does not lead, of the right shape alone."""
        if out is None:
            out = torch.empty((hidden.shape[0], self.spec.vocab), dtype=self.dtype, device=hidden.device)
        return super().logits(hidden, out, adapters) if self._place.is_last else out

    def own_logits(self, hidden: Tensor, out: Tensor, adapters: AdapterInputs | None = None) -> Tensor:
        """As `Decoder.own_logits`, `[S, V / tensors]`; before the last stage of the right shape alone."""
        if self._place.tensors == 1:
            return self.logits(hidden, out, adapters)
        columns = len(self._place.rows(self.spec.vocab))
        own = out.view(-1)[: len(out) * columns].view(len(out), columns)
        if not self._place.is_last:
            return own
        own = super()._scores(hidden, own, adapters)
        return own if self._own_unused is None else own.index_fill_(1, self._own_unused, -math.inf)

    def _scores(self, hidden: Tensor, out: Tensor | None, adapters: AdapterInputs | None) -> Tensor:
        assert out is not None, "shards are gathered to a place"
        return self.collectives.gather(super()._scores(hidden, None, adapters), out)

    def _columns(self, ids: Tensor) -> Tensor:
        """Where those of `ids` that are in this rank's part of the vocabulary stand in it."""
        rows = self._place.rows(self.spec.vocab)
        return ids[(ids >= rows.start) & (ids < rows.stop)] - rows.start

    def _of_all(self, means: Tensor, sharing: int) -> Tensor:
        # Ranks that share are neighbours: each lot of them has columns of its own in what all ranks sum.
        spans, first = means.shape[1], self._place.tensor // sharing * means.shape[1]
        sums = means.new_zeros((means.shape[0], self._place.tensors // sharing * spans))
        sums[:, first : first + spans] = means
        return self.collectives.sum(sums)[:, first : first + spans] / sharing

    def _norm_together(self, qkv: Tensor, weights: tuple[Tensor, Tensor]) -> None:
        if self._place.tensors == 1:
            return super()._norm_together(qkv, weights)
        # Key heads that several ranks have are had by as many each, so their mean is that of all.
        means = self._of_all(mean_squares(qkv, [len(each) for each in weights]), self._place.tensors)
        rms_norm_by(qkv, weights, means, self.spec.eps)
        return None

    def _enter(self, inputs: ForwardInputs) -> Tensor:
        if self._place.is_first:
            return super()._enter(inputs)
        ids = inputs.ids
        return self.collectives.receive(torch.empty((len(ids), self.spec.hidden), dtype=self.dtype, device=ids.device))

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        if self._place.tensors == 1:
            return super()._embedded(inputs)
        # A token's row, with its learned position, is one rank's.
        own, mine = self._own_rows(inputs.ids)
        return self.collectives.sum(super()._embedded(replace(inputs, ids=own)).mul_(mine))

    def token_rows(self, ids: Tensor) -> Tensor:
        """As `Decoder.token_rows`, for ranks of one stage alone."""
        assert self._place.stages == 1, "only the first stage has the embedding"
        own, mine = self._own_rows(ids)
        return self.collectives.sum(super().token_rows(own).mul_(mine))

    def _own_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where the rows of `ids` are in this rank's part, and whether they are `[T, 1]`: of others any row is read."""
        rows = self._place.rows(self.spec.vocab)
        mine = (ids >= rows.start) & (ids < rows.stop)
        return (ids - rows.start).clamp_(0, len(rows) - 1), mine.unsqueeze(1)

    def _whole(self, part: Tensor) -> Tensor:
        # Else the stream sums, when it adds what it is given.
        return self.collectives.sum(part) if self.spec.parallel else part

    def _leave(self, update: Tensor, residual: Tensor, beside: Tensor | None) -> Tensor:
        # Before the last stage the sum counts, and what is normed of it by weights of one does not.
        hidden = super()._leave(update, residual, beside)
        if not self._place.is_last:
            self.collectives.send(residual)
        return hidden
