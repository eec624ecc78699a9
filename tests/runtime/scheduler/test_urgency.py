"""Under `priority`, who waits and is more urgent makes the least urgent leave, and nobody leaves for nothing."""

from __future__ import annotations

import random

import pytest
from tests.runtime.scheduler.harness import Harness

from stoker_runtime.request import FinishReason
from stoker_runtime.scheduler.sequence import Sequence


def prompt(number: int, length: int = 4) -> tuple[int, ...]:
    return tuple((number * 7 + at) % 90 for at in range(length))


def full(**sizes: object) -> tuple[Harness, list[Sequence]]:
    """Two slots, both taken: priority 5 that came first, and 3."""
    harness = Harness(**({"policy": "priority", "max_num_seqs": 2, "prefix_caching": False} | sizes))
    runs = [
        harness.add(prompt(1), max_tokens=20, priority=5, arrival=1.0),
        harness.add(prompt(2), max_tokens=20, priority=3, arrival=2.0),
    ]
    harness.step()
    return harness, runs


def test_an_urgent_request_takes_the_slot_of_the_least_urgent() -> None:
    harness, (low, middle) = full()
    urgent = harness.add(prompt(3), priority=1, arrival=3.0)
    batch = harness.schedule()
    assert (low.slot, harness.scheduler.stats().preemptions) == (-1, 1)
    assert min(urgent.slot, middle.slot) >= 0
    assert batch.decodes == (middle.slot,)
    assert [chunk.slot for chunk in batch.prefills] == [urgent.slot]
    harness.commit(batch)
    harness.run()
    assert {each.finish for each in (low, middle, urgent)} == {FinishReason.LENGTH}
    assert harness.scheduler.stats().preemptions == 1, "who was displaced does not displace"


@pytest.mark.parametrize("priority", [5, 6])
def test_an_equal_or_lower_priority_waits(priority: int) -> None:
    harness, (low, _) = full()
    late = harness.add(prompt(3), priority=priority, arrival=0.0)
    harness.step()
    assert low.slot >= 0
    assert late.slot < 0
    assert harness.scheduler.stats().preemptions == 0


def test_a_middle_priority_displaces_only_what_is_below_it() -> None:
    harness, (low, middle) = full()
    first, second = (harness.add(prompt(3 + at), priority=4, arrival=3.0 + at) for at in range(2))
    harness.step()
    assert low.slot < 0
    assert min(middle.slot, first.slot) >= 0
    assert second.slot < 0
    assert harness.scheduler.stats().preemptions == 1


def test_several_come_in_one_step() -> None:
    harness, (low, middle) = full()
    urgent = [harness.add(prompt(3 + at), priority=0, arrival=3.0) for at in range(2)]
    harness.step()
    assert max(low.slot, middle.slot) < 0
    assert min(each.slot for each in urgent) >= 0


def test_one_that_is_about_to_end_is_left_to_end() -> None:
    harness, (low, middle) = full()
    for _ in range(18):
        harness.step()
    assert low.computed == low.limit - 2
    urgent = harness.add(prompt(3), priority=0, arrival=3.0)
    harness.step()
    assert (low.finish, middle.finish) == (FinishReason.LENGTH, FinishReason.LENGTH)
    harness.step()
    assert urgent.slot >= 0
    assert harness.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_other_policies_displace_nobody(policy: str) -> None:
    harness, (low, _) = full(policy=policy)
    urgent = harness.add(prompt(3), max_tokens=1, priority=-5, arrival=3.0)
    harness.step()
    assert low.slot >= 0
    assert urgent.slot < 0


def test_pages_are_made_free_too_and_no_more_than_needed() -> None:
    harness = Harness(policy="priority", num_pages=8, max_num_batched_tokens=64, prefix_caching=False)
    runs = [harness.add(prompt(at, 7), priority=5, arrival=float(at)) for at in range(4)]
    harness.step()
    assert harness.scheduler.stats().pages_used == 8
    urgent = harness.add(prompt(9, 6), priority=0, arrival=9.0, max_tokens=1)
    batch = harness.schedule()
    assert urgent.slot >= 0
    assert [each.slot >= 0 for each in runs] == [True, True, True, False], "of equals the one that came last leaves"
    harness.commit(batch)
    harness.run()
    assert {each.finish for each in runs} == {FinishReason.LENGTH}


def test_nobody_leaves_when_that_would_not_do() -> None:
    harness = Harness(policy="priority", num_pages=8, prefix_caching=False)
    middle = harness.add(prompt(1, 16), priority=2, arrival=1.0, max_tokens=4)
    harness.step()
    low = harness.add(prompt(2, 4), priority=5, arrival=2.0, max_tokens=3)
    harness.step()
    urgent = harness.add(prompt(3, 30), priority=3, arrival=3.0)
    for _ in range(2):
        harness.step()
    assert (urgent.slot, low.slot >= 0 or low.finish is not None) == (-1, True)
    assert harness.scheduler.stats().preemptions == 0, "even both pages of `low` are not enough beside `middle`"
    harness.run()
    assert {each.finish for each in (middle, low, urgent)} == {FinishReason.LENGTH}


def test_one_that_cannot_run_yet_makes_nobody_leave() -> None:
    harness, (low, _) = full()
    held = harness.add(prompt(3), priority=0, arrival=3.0)
    held.held = True
    ready = harness.add(prompt(4), priority=5, arrival=4.0)
    harness.step()
    assert low.slot >= 0
    assert max(held.slot, ready.slot) < 0
    held.held = False
    harness.step()
    assert low.slot < 0
    assert held.slot >= 0


def test_pages_that_others_hold_as_well_are_no_room() -> None:
    harness = Harness(policy="priority", num_pages=5, page_size=4, max_num_batched_tokens=32)
    shared = prompt(1, 13)
    kept = harness.add(shared, priority=0, arrival=1.0, max_tokens=4)
    harness.step()
    low = harness.add(shared, priority=5, arrival=2.0, max_tokens=3)
    harness.step()
    assert low.pages[:3] == kept.pages[:3]
    harness.add(prompt(7, 6), priority=2, arrival=3.0, max_tokens=1)
    harness.step()
    assert low.slot >= 0, "it would free one page only, and two are needed"


def test_an_urgent_prompt_goes_before_prompts_under_way() -> None:
    harness = Harness(policy="priority", max_num_batched_tokens=8, prefix_caching=False)
    long = harness.add(prompt(1, 40), priority=5, arrival=1.0)
    harness.step()
    urgent = harness.add(prompt(2, 6), priority=0, arrival=2.0)
    batch, _ = harness.step()
    assert [(chunk.slot, len(chunk.token_ids)) for chunk in batch.prefills] == [(urgent.slot, 6), (long.slot, 2)]
    harness.run()
    assert long.finish is FinishReason.LENGTH


def test_a_displaced_sequence_waits_on_the_host() -> None:
    harness, (low, _) = full(host_pages=8)
    harness.add(prompt(3), priority=1, arrival=3.0, max_tokens=2)
    batch = harness.schedule()
    assert low.stored is not None
    assert len(batch.swap_outs) == 1
    harness.commit(batch)
    while low.slot < 0:
        batch, _ = harness.step()
    assert batch.prefills[0].start == 4
    assert len(batch.swap_ins) == 1


@pytest.mark.parametrize("host_pages", [0, 32])
@pytest.mark.parametrize("seed", range(60))
def test_random_priorities(seed: int, host_pages: int) -> None:
    """While a sequence waits for a slot, nobody who is less urgent runs; and in the end everybody is done."""
    rng = random.Random(seed)
    harness = Harness(
        policy="priority",
        num_pages=64,
        max_num_seqs=rng.choice([1, 3, 6]),
        host_pages=host_pages,
        max_num_batched_tokens=256,
        prefix_caching=rng.random() < 0.5,
    )
    everyone: list[Sequence] = []
    launched = None
    for number in range(60):
        for _ in range(rng.choice([0, 0, 1, 3])):
            length, priority = rng.randint(1, 12), rng.randint(-2, 2)
            tokens = tuple(rng.randrange(90) for _ in range(length))
            everyone.append(
                harness.add(tokens, max_tokens=rng.randint(1, 12), priority=priority, arrival=float(number))
            )
        batch = harness.scheduler.schedule()
        harness.scheduler.check()
        running = [each.request.priority for each in everyone if each.slot >= 0 and each.computed < each.limit - 1]
        ready = [each for each in everyone if each.queued and len(each.tokens) >= each.awaited]
        if ready and running:
            assert min(each.request.priority for each in ready) >= max(running), "less urgent ones run before it"
        if launched is not None:
            harness.commit(launched)
        launched = batch
    if launched is not None:
        harness.commit(launched)
    harness.run()
    assert all(each.finish is not None for each in everyone)
    # Each displacement is by somebody more urgent, so there are fewer of them than pairs that could meet.
    assert harness.scheduler.stats().preemptions <= len(everyone) * 5
