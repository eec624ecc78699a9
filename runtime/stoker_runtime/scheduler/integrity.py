"""Whether the scheduler's lists, its queue and what sequences hold agree: asked after every step of every test.

Invariants: changes nothing.
Knows nothing of how they came to be.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from stoker_runtime.scheduler.placement import Placement
from stoker_runtime.scheduler.policy import WaitingQueue
from stoker_runtime.scheduler.sequence import Sequence


def check_lists(
    decoding: Many[Sequence],
    prefilling: Many[Sequence],
    ending: Many[Sequence],
    waiting: WaitingQueue,
    placement: Placement,
    *,
    idle: bool,
) -> None:
    """Raise AssertionError unless slots and pages are those of who runs, in order; none are held when `idle`."""
    running = dict.fromkeys((*decoding, *prefilling, *ending))
    queued = waiting.members()
    placement.check([sequence for sequence in running if sequence.slot >= 0], queued)
    for members in (decoding, prefilling):
        orders = [sequence.order for sequence in members]
        assert orders == sorted(orders), "running sequences are out of order"
    assert len(queued) == len(waiting), "the queue lost count"
    for sequence in queued:
        assert sequence.slot < 0, f"{sequence.request.id} waits and runs"
        assert sequence.finish is None, f"{sequence.request.id} waits although it ended"
    if idle:
        assert placement.pages.used == 0, "pages are held while nothing runs"
        assert len(placement.free_slots) == placement.num_slots, "slots are held"
