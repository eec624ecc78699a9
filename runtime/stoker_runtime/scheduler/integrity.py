"""Whether the scheduler's lists, its queue and what sequences hold agree: asked after every step of every test.

Invariants: changes nothing.
Knows nothing of how they came to be.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from stoker_runtime.scheduler.placement import Placement
from stoker_runtime.scheduler.policy import WaitingQueue
from stoker_runtime.scheduler.sequence import NO_SLOT, Sequence


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
    _check_placed(placement, [sequence for sequence in running if sequence.slot >= 0], queued)
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


def _check_placed(placement: Placement, sequences: Many[Sequence], waiting: Many[Sequence]) -> None:
    """Raise AssertionError unless slots and pages are those of `sequences`, and the host's of those `waiting`."""
    slots = [sequence.slot for sequence in sequences]
    assert NO_SLOT not in slots, "a sequence is placed without a slot"
    assert sorted(slots + placement.free_slots) == list(range(placement.num_slots)), "slots are lost or shared"
    for sequence in sequences:
        upper = sequence.computed + sequence.ahead
        assert upper <= placement.capacity(sequence), f"{sequence.request.id} outgrew its pages"
        assert sequence.stored is None, f"{sequence.request.id} runs and is stored on the host"
        if placement.near is not None:
            placement.near.check(sequence)
    placed = [(sequence.request.adapter, sequence.adapter_slot) for sequence in sequences]
    placement.adapters.check(placed, (sequence.request.adapter for sequence in waiting))
    placement.pages.check([*(sequence.all_pages for sequence in sequences), placement.copy_sources])
    if placement.states is not None:
        placement.states.snapshots.check(placement.pages.is_cached)
    stored = [sequence.stored for sequence in waiting if sequence.stored is not None]
    assert len(stored) == placement.swapped, "sequences on the host are miscounted"
    if placement.host is not None:
        placement.host.check(stored)
