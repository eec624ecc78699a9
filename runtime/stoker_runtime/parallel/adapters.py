"""Adapters of one rank: its part of each, that all ranks have, or none.

    begin   the leader tells the others; each rank reads its part of the folder by a thread, beside the steps
    poll    between steps, once the leader has read its own: all say how far they are; a folder that one rank cannot
            read is read by nobody
    keep    the leader tells the others to hold what they have read

Invariants: what the leader does to its copies the others do in the same order between the same steps, so a batch finds
an adapter on every rank or on none. Nobody waits for another one's files.
Knows nothing of processes, and of how orders travel.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from stoker_runtime.adapters.files import HostAdapter
from stoker_runtime.adapters.layout import ModelCut
from stoker_runtime.adapters.memory import AdapterMemory
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ModelError, StokerError
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.adapter_order import Act, AdapterOrder
from stoker_runtime.parallel.collectives import Collectives

FAILED, READING, READ = range(3)
"""How far a rank is with a folder: the least of all ranks' is how far they are together."""


class Others(Protocol):
    """The other ranks, as the leader's adapters need them."""

    def tell(self, order: AdapterOrder) -> None:
        """Give every other rank an order. Raises EngineDeadError when they are gone."""
        ...

    def meeting(self) -> AbstractContextManager[bool]:
        """Within it they are asked what they say; False while they are asked something else."""
        ...


class RankAdapters(AdapterMemory):
    """`AdapterMemory` of one rank. `others` is the leader's way to the other ranks, None on these."""

    others: Others | None = None

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        cut: ModelCut,
        collectives: Collectives,
    ) -> None:
        super().__init__(config, spec, dtype, device, cut)
        self._collectives = collectives
        self._own: dict[int, Future[HostAdapter]] = {}
        """What this rank reads, or has read and nobody has decided about."""
        self._shared: dict[int, Future[HostAdapter]] = {}
        """The leader's: of those, what all ranks read."""
        self._fresh: dict[int, HostAdapter] = {}

    def begin(self, number: int, path: str) -> Future[HostAdapter]:
        """As `AdapterMemory.begin`, on every rank: the future ends in a `poll`, when all have read theirs."""
        own = self._own[number] = super().begin(number, path)
        if self.others is None:
            return own
        self.others.tell(AdapterOrder(Act.BEGIN, number, path))
        self._shared[number] = Future()
        return self._shared[number]

    def poll(self) -> None:
        """Ask all ranks about the folders that this one has read. The leader's."""
        assert self.others is not None, "a rank that does not lead asks"
        for number in [number for number in self._shared if self._own[number].done()]:
            with self.others.meeting() as free:
                if not free:
                    return
                self.others.tell(AdapterOrder(Act.AGREE, number))
                self._agree(number)

    def _agree(self, number: int) -> None:
        """Every rank calls it at the same time."""
        own = self._own[number]
        error = own.exception() if own.done() else None
        state = FAILED if error is not None else READ if own.done() else READING
        together = self._collectives.least(state)
        if together == READING:
            return
        shared = self._shared.pop(number, None)
        if together == READ:
            if shared is not None:
                shared.set_result(own.result())
            return
        del self._own[number]
        told = self._reason(error)
        if shared is not None:
            shared.set_exception(error or ModelError(told))

    def _reason(self, error: BaseException | None) -> str:
        """Why the first rank that failed did, on every rank."""
        place = self._collectives.place
        first = self._collectives.least(place.world if error is None else place.rank)
        mine = error.message if isinstance(error, StokerError) else f"{type(error).__name__}: {error}"
        return f"rank {first}: {self._collectives.told_by(first, mine)}"

    def keep(self, number: int, adapter: HostAdapter) -> None:
        """As `AdapterMemory.keep`, on every rank what it has read."""
        if self.others is not None:
            self.others.tell(AdapterOrder(Act.KEEP, number))
        self._own.pop(number, None)
        super().keep(number, adapter)

    def drop(self, number: int) -> None:
        """As `AdapterMemory.drop`, on every rank."""
        if self.others is not None:
            self.others.tell(AdapterOrder(Act.DROP, number))
        self._own.pop(number, None)
        super().drop(number)

    def obey(self, order: AdapterOrder) -> None:
        """Do what the leader's order says."""
        if order.act is Act.BEGIN:
            self.begin(order.number, order.path)
        elif order.act is Act.AGREE:
            self._agree(order.number)
        elif order.act is Act.KEEP:
            self.keep(order.number, self._own[order.number].result())
        else:
            self.drop(order.number)

    def read_again(self) -> None:
        """Read the host's copies again; they are replaced by `take_fresh`."""
        self._fresh = self._read_anew()

    def take_fresh(self) -> None:
        """Replace copies that every rank has read again, if any were. Every rank calls it at the same time."""
        for number in self._collectives.share_all(list(self._fresh)):
            fresh = self._fresh.pop(number, None)
            # One that was dropped meanwhile hinders nobody.
            if self._collectives.least(int(fresh is not None or number not in self._hosts)) and number in self._hosts:
                assert fresh is not None, "a copy that is there was read again"
                self._hosts[number] = fresh
        self._fresh.clear()
