"""What makes an executor that of one rank: its part of the model, and the exchanges in its steps.

Invariants: every rank builds the same things in the same order, so that their exchanges meet.
Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stoker_runtime.config import EngineConfig
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.adapters import RankAdapters
from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.decoder import RankDecoder
from stoker_runtime.parallel.group import EarlyGroup
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import Place
from stoker_runtime.parallel.sampler import RankSampler
from stoker_runtime.parallel.shared_rows import shared_tokens
from stoker_runtime.parallel.store import agree, open_store


class Rank:
    """The rank at `place` of a model that is run as `config` says; it meets the others at `meeting`.

    `early`: the group of all ranks, where it is coming about already.
    """

    def __init__(
        self, config: EngineConfig, place: Place, meeting: Meeting, early: EarlyGroup | None = None
    ) -> None:
        self.place = place
        self._meeting = meeting
        self._early = early
        self._ordered = config.batch_invariant
        # GPUs that reach each other's memory sum by kernels of their own, which serve sums up to a size, and round
        # otherwise than a norm that comes by itself.
        self._by_peers = not config.disable_custom_all_reduce and not self._ordered
        self._collectives: Collectives | None = None

    @property
    def collectives(self) -> Collectives:
        """The rank's end of the exchanges, once it has met the others."""
        assert self._collectives is not None, "exchanges before the ranks have met"
        return self._collectives

    def cut(self, whole: ModelSpec) -> Cut:
        """Its part of a model. Raises ConfigError or ModelError where the model cannot be cut so."""
        return Cut(whole, self.place)

    def meet(
        self,
        whole: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        config: EngineConfig,
        decided: Mapping[str, str],
    ) -> None:
        """Make every communicator. Blocks until all ranks are there.

        Raises ConfigError where the leader, on another machine, has not `decided` alike.
        """
        early, self._early = self._early, None
        store = early.wait() if early else open_store(self._meeting, self.place)
        if self.place.nodes > 1:
            agree(store, self.place, {"device": device.type, **decided})
        self._collectives = Collectives(self.place, device, store, ordered=self._ordered, has_met=early is not None)
        if self._by_peers and device.type == "cuda" and self.place.tensors > 1:
            self._collectives.open_peers()
            if self.place.stages == 1 and dtype is torch.bfloat16:
                self._collectives.share_rows(shared_tokens(whole, config), whole.hidden)
        self._collectives.warm(whole.hidden, whole.vocab, dtype)

    def decoder(
        self, spec: ModelSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, max_model_len: int
    ) -> RankDecoder:
        """The decoder of its part."""
        return RankDecoder(spec, weights, device, dtype, max_model_len=max_model_len, collectives=self.collectives)

    def adapters(
        self, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, cut: Cut
    ) -> RankAdapters:
        """Its part of adapters."""
        return RankAdapters(config, spec, dtype, device, cut, self.collectives)

    def sampler(self, slots: int, vocab: int, device: torch.device) -> RankSampler:
        """The sampler of its steps."""
        return RankSampler(slots, vocab, device, collectives=self.collectives)
