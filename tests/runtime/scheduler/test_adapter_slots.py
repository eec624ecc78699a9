"""Which adapter gives up its slot: the one that was not used for the longest, and never one that is in use."""

from __future__ import annotations

import random

import pytest

from stoker_runtime.scheduler.adapter_slots import AdapterSlots


def use(slots: AdapterSlots, adapter: int) -> int:
    """A sequence with this adapter comes and goes: its slot."""
    slot = slots.acquire(adapter)
    slots.release(adapter)
    return slot


def test_an_adapter_that_was_used_again_outlives_one_that_was_not() -> None:
    slots = AdapterSlots(2)
    first, second = use(slots, 31), use(slots, 12)
    assert use(slots, 31) == first
    assert slots.take_loads() == ((31, first), (12, second)), "what has a slot is not brought again"
    assert use(slots, 70) == second
    assert use(slots, 31) == first
    assert slots.take_loads() == ((70, second),)


def test_one_in_use_stays_however_long_ago_it_came() -> None:
    slots = AdapterSlots(2)
    kept = slots.acquire(5)
    for adapter in (9, 4, 23):
        assert slots.has_room(adapter)
        assert use(slots, adapter) != kept
    slots.acquire(4)
    assert not slots.has_room(9)
    assert slots.has_room(5)
    slots.release(5)
    assert slots.acquire(9) == kept


@pytest.mark.parametrize("seed", range(20))
def test_the_one_that_goes_is_the_one_that_was_left_first(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    slots = AdapterSlots(count)
    held: dict[int, int] = {}
    left: dict[int, int] = {}
    placed: list[int] = []
    for now in range(400):
        adapter = rng.randint(1, count + 3)
        if placed and rng.random() < 0.5:
            gone = placed.pop(rng.randrange(len(placed)))
            slots.release(gone)
            if gone not in placed:
                left[gone] = now
        elif slots.has_room(adapter):
            expected: tuple[tuple[int, int], ...] = ()
            if adapter not in held:
                victim = min(left, key=left.__getitem__) if len(held) == count else None
                freed = held.pop(victim) if victim is not None else None
                if victim is not None:
                    del left[victim]
                slot = slots.acquire(adapter)
                assert freed in (None, slot)
                assert slot not in held.values()
                held[adapter] = slot
                expected = ((adapter, slot),)
            else:
                assert slots.acquire(adapter) == held[adapter]
            left.pop(adapter, None)
            placed.append(adapter)
            assert slots.take_loads() == expected
        else:
            assert adapter not in held
            assert len(held) == count
            assert not left
        slots.check([(each, held[each]) for each in placed], ())
