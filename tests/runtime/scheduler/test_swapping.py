"""What a preempted sequence leaves on the host, and what it and others find there."""

from __future__ import annotations

import pytest
from tests.runtime.scheduler.harness import Harness

from stoker_runtime.request import FinishReason
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.batch import Batch


def squeezed(**sizes: object) -> tuple[Harness, Sequence, Sequence, Batch]:
    """Four pages of four tokens for two sequences of seven: the second one has to leave after nine tokens each."""
    harness = Harness(**({"num_pages": 4, "host_pages": 8, "prefix_caching": False} | sizes))
    kept, victim = harness.add(7), harness.add((30, 31, 32, 33, 34, 35, 36))
    harness.step()
    harness.step()
    return harness, kept, victim, harness.schedule()


def until_back(harness: Harness, batch: Batch, sequence: Sequence) -> Batch:
    while sequence.slot < 0:
        harness.commit(batch)
        batch = harness.schedule()
    return batch


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    harness, _, victim, batch = squeezed()
    assert victim.stored is not None
    assert (victim.stored.positions, len(victim.stored.pages)) == (8, 2)
    assert [host for _, host in batch.swap_outs] == list(victim.stored.pages)
    assert (harness.scheduler.stats().swapped, harness.scheduler.stats().host_pages_used) == (1, 2)
    batch = until_back(harness, batch, victim)
    [chunk] = batch.prefills
    assert (chunk.start, len(chunk.token_ids), chunk.sample) == (8, 1, True), "only the newest token runs"
    assert [page for _, page in batch.swap_ins] == victim.pages[:2]
    harness.commit(batch)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.swapped, stats.host_pages_used, stats.pages_swapped_out, stats.pages_swapped_in) == (0, 0, 2, 2)
    assert victim.finish is FinishReason.LENGTH


def test_pages_leave_before_they_are_given_to_others() -> None:
    _, kept, _, batch = squeezed()
    grown = next(update for update in batch.page_updates if update.slot == kept.slot)
    assert set(grown.pages) <= {page for page, _ in batch.swap_outs}, "the step that takes the page copies it out first"


@pytest.mark.parametrize(("sizes", "why"), [
    ({"host_pages": 1}, "the pool is too small"),
    ({"host_page_tokens": 4.5}, "two pages take longer than eight tokens"),
    ({"host_pages": 0}, "there is no pool"),
])  # fmt: skip
def test_otherwise_it_is_computed_again(sizes: dict[str, object], why: str) -> None:
    harness, _, victim, batch = squeezed(**sizes)
    assert victim.slot < 0
    assert victim.stored is None, why
    assert batch.swap_outs == ()
    batch = until_back(harness, batch, victim)
    assert batch.prefills[0].start == 0
    assert batch.swap_ins == ()


def test_a_prompt_half_computed_is_kept_too() -> None:
    harness = Harness(num_pages=8, host_pages=8, prefix_caching=True, max_num_batched_tokens=6)
    harness.add(4, arrival=2.0)
    harness.add((60, 61), arrival=1.0)
    harness.step()
    newest = harness.add(tuple(range(20, 40)), arrival=3.0)
    batch = harness.schedule()
    while newest.slot >= 0:
        computed = newest.computed
        harness.commit(batch)
        batch = harness.schedule()
    assert 0 < computed < 20
    assert newest.stored is not None
    assert newest.stored.positions == computed
    while newest.slot < 0:
        harness.commit(batch)
        batch = harness.schedule()
    assert next(chunk.start for chunk in batch.prefills if chunk.slot == newest.slot) == computed


def test_shared_pages_stay_with_those_who_share_them() -> None:
    harness = Harness(num_pages=6, host_pages=8)
    prompt = tuple(range(1, 10))
    kept = harness.add(prompt, max_tokens=12)
    harness.step()
    victim = harness.add(prompt, max_tokens=12)
    batch, _ = harness.step()
    shared = kept.pages[:2]
    assert victim.pages[:2] == shared
    while victim.slot >= 0:
        batch, _ = harness.step()
    assert victim.stored is not None
    assert victim.stored.first == 2
    assert not {page for page, _ in batch.swap_outs} & set(shared)
    known = len(victim.tokens)
    batch = until_back(harness, harness.schedule(), victim)
    assert batch.prefills[0].start == known - 1
    assert not {page for _, page in batch.swap_ins} & set(shared)


def test_without_a_cache_shared_pages_are_copied() -> None:
    harness = Harness(num_pages=8, host_pages=16, prefix_caching=False)
    requests = [harness.add(13, family="f") for _ in range(3)]
    while all(each.stored is None for each in requests):
        harness.step()
    stored = next(each.stored for each in requests if each.stored is not None)
    assert stored is not None
    assert stored.first == 0
    harness.run()
    assert {len(each.tokens) for each in requests} == {21}


def test_an_abort_frees_the_host() -> None:
    harness, _, victim, batch = squeezed()
    assert harness.scheduler.abort(victim)
    assert harness.scheduler.stats().host_pages_used == 0
    harness.commit(batch)
    harness.scheduler.check()


def test_a_failed_step_leaves_nothing_to_trust() -> None:
    harness, kept, victim, _ = squeezed()
    assert harness.scheduler.fail("broken") == [kept]
    harness.scheduler.check()
    assert victim.stored is None
    assert harness.scheduler.stats().host_pages_used == 0
    batch = harness.schedule()
    assert batch.prefills[0].start == 0
    assert batch.swap_outs == batch.swap_ins == ()


def test_evicted_prefixes_come_back_from_the_host() -> None:
    harness = Harness(num_pages=4, host_pages=16)
    prompt = tuple(range(1, 10))
    harness.add(prompt, max_tokens=1)
    harness.step()
    for first in (20, 40):
        harness.add(tuple(range(first, first + 13)), max_tokens=1)
        harness.step()
    again = harness.add(prompt, max_tokens=4)
    batch = harness.schedule()
    assert again.cached_tokens == 8
    assert batch.prefills[0].start == 8
    assert [page for _, page in batch.swap_ins] == again.pages[:2]
    stats = harness.scheduler.stats()
    assert (stats.prefix_hits, stats.host_queries, stats.host_hits) == (0, 9 + 13 + 13 + 9, 8)
    other = harness.add((*prompt[:8], 77), max_tokens=2)
    harness.commit(batch)
    assert harness.schedule().swap_ins == ()
    assert other.pages[:2] == again.pages[:2], "what came back is shared on the device"


def test_a_prompt_on_the_host_whole_needs_no_copy() -> None:
    harness = Harness(num_pages=4, host_pages=16)
    prompt = tuple(range(1, 9))
    harness.add(prompt, max_tokens=1)
    harness.step()
    harness.add(tuple(range(20, 36)), max_tokens=0)
    harness.step()
    again = harness.add(prompt, max_tokens=4)
    batch = harness.schedule()
    assert (batch.prefills[0].start, batch.copies, len(batch.swap_ins)) == (7, (), 2)
    assert again.cached_tokens == 7


def test_another_salt_finds_nothing_on_the_host() -> None:
    harness = Harness(num_pages=4, host_pages=16)
    prompt = tuple(range(1, 10))
    harness.add(prompt, max_tokens=1)
    harness.step()
    harness.add(tuple(range(20, 36)), max_tokens=0)
    harness.step()
    harness.add(prompt, max_tokens=4, cache_salt="other")
    assert harness.schedule().swap_ins == ()
