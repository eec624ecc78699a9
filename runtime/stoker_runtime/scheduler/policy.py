"""Who runs first: the order of each scheduling policy, and the queue of those who wait.

Invariants: an order is fixed when a sequence arrives, so a preempted sequence keeps its place. Orders are total.
Knows nothing of pages, slots or steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from stoker_runtime.request import Request
from stoker_runtime.scheduler.sequence import Sequence

SJF_AGEING = 500.0
"""Tokens of work that one second of waiting makes up for under `sjf`, so that a long job is not starved."""

Order = tuple[float, ...]


def fcfs(request: Request, serial: int) -> Order:
    """First come, first served."""
    return (request.arrival, serial)


def priority(request: Request, serial: int) -> Order:
    """Lower `priority` first; equals by arrival, so nobody starves for want of his equals.

    A low priority may starve while more urgent requests keep coming: that is what it asks for.
    """
    return (request.priority, request.arrival, serial)


def shortest_job_first(request: Request, serial: int) -> Order:
    """Least work first, with ageing.

    Everyone ages at the same rate, so `work - rate * (now - arrival)` orders as `work + rate * arrival` does.
    """
    work = len(request.prompt_token_ids) + request.params.max_tokens
    return (work + SJF_AGEING * request.arrival, serial)


POLICIES: dict[str, Callable[[Request, int], Order]] = {
    "fcfs": fcfs,
    "priority": priority,
    "sjf": shortest_job_first,
}


DISPLACING = ("priority",)
"""Policies under which one who waits can make one who runs leave, if its `priority` is lower."""


class WaitingQueue:
    """Waiting sequences, best order first. Removal is lazy: a removed sequence is skipped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        assert not sequence.queued, f"{sequence.request.id} waits already"
        sequence.queued = True
        self._count += 1
        heapq.heappush(self._heap, (sequence.order, sequence))

    def best(self) -> Sequence | None:
        """The one that `pop` would give."""
        while self._heap and not self._heap[0][1].queued:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence | None:
        """Remove and return the best, or None."""
        while self._heap:
            _, sequence = heapq.heappop(self._heap)
            if sequence.queued:
                sequence.queued = False
                self._count -= 1
                return sequence
        return None

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out for good: it must never be pushed again."""
        if sequence.queued:
            sequence.queued = False
            self._count -= 1

    def members(self) -> list[Sequence]:
        """Those who wait, in no order."""
        return [sequence for _, sequence in self._heap if sequence.queued]
