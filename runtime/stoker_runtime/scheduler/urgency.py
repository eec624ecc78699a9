"""Who must leave so that more urgent sequences can run: the one of the lowest priority first.

Lower `priority` is more urgent, as in vLLM. Only a strictly lower value displaces: among equals who runs stays, so two
sequences never take turns in displacing each other. Nobody leaves unless the one it leaves for can then run.

Invariants: nothing is changed here; the scheduler preempts the `victims`. Pages that others hold as well do not count
as room.
Knows nothing of why somebody has to wait, or of where pages go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from stoker_runtime.scheduler.placement import Placement
from stoker_runtime.scheduler.policy import WaitingQueue
from stoker_runtime.scheduler.sequence import Sequence

MAX_PASSED = 256
"""Waiting sequences looked at in one step."""


class Clearance:
    """The room that running sequences leave if its `victims` go. It grows claim by claim."""

    def __init__(self, placement: Placement, running: Iterable[Sequence], crossing: int) -> None:
        """So many of the running sequences are `crossing` into another page in this step, which is spoken for."""
        self.victims: list[Sequence] = []
        self._pages = placement.pages
        self._left = sorted(running, key=lambda each: each.order)
        self._room = placement.room - crossing * placement.growth
        self._slots = len(placement.free_slots)
        self._released: Counter[int] = Counter()

    def make(self, waiting: WaitingQueue, budget: int, wants: Callable[[Sequence], tuple[int, int] | None]) -> None:
        """Claim room for those who wait, in order, for as long as `budget` tokens last and others can leave.

        `wants` tells how many pages a sequence needs and how many tokens it will compute; None: it cannot run now.
        """
        passed: list[Sequence] = []
        while budget > 0 and len(passed) < MAX_PASSED and (sequence := waiting.pop()) is not None:
            passed.append(sequence)
            if not self._left or sequence.request.priority >= self._left[-1].request.priority:
                break
            wanted = wants(sequence)
            if wanted is None:
                continue
            pages, tokens = wanted
            if not self.claim(sequence, pages):
                break
            budget -= tokens
        for sequence in passed:
            waiting.push(sequence)

    def claim(self, sequence: Sequence, pages: int) -> bool:
        """Reserve a slot and `pages`, by further victims if need be; False, and none are added, when that cannot do."""
        left, slots, room = len(self._left), self._slots - 1, self._room - pages
        released = self._released.copy()
        while slots < 0 or room < 0:
            left -= 1
            if left < 0 or self._left[left].request.priority <= sequence.request.priority:
                return False
            slots += 1
            room += self._gain(self._left[left], released)
        self.victims += reversed(self._left[left:])
        del self._left[left:]
        self._slots, self._room, self._released = slots, room, released
        return True

    def _gain(self, victim: Sequence, released: Counter[int]) -> int:
        """Pages that become available when `victim` leaves after those that are counted in `released`."""
        pages = victim.all_pages
        released.update(pages)
        return sum(1 for page in pages if released[page] == self._pages.references(page))
