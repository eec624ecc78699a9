"""The scheduler's decisions one by one: what a step holds, who ends when, who is preempted, what is shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.runtime.scheduler.harness import EOS, TOKEN, Harness

from stoker_runtime.errors import CapacityError, ConfigError, EngineError, RequestError
from stoker_runtime.request import FinishReason
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.result import StepResult


def test_a_prompt_is_cut_to_the_budget_and_mixed_with_decodes() -> None:
    harness = Harness()
    first = harness.add(6)
    harness.step()
    harness.add(tuple(range(50, 80)))
    batch = harness.schedule()
    assert batch.decodes == (first.slot,)
    assert [(chunk.start, len(chunk.token_ids), chunk.sample) for chunk in batch.prefills] == [(0, 15, False)]
    assert batch.num_tokens == 16
    after = harness.schedule()
    assert [(chunk.start, len(chunk.token_ids), chunk.sample) for chunk in after.prefills] == [(15, 15, True)]
    assert len(after.sampled_slots) == 2


def test_an_unchanged_step_uploads_nothing() -> None:
    harness = Harness()
    harness.add(5)
    harness.step()
    first, second = harness.schedule(), harness.schedule()
    assert (second.assigns, second.page_updates, second.copies, second.prefills) == ((), (), (), ())
    assert second.decodes is first.decodes


def test_a_page_is_added_when_a_sequence_crosses_its_end() -> None:
    harness = Harness()
    sequence = harness.add(7)
    batch, _ = harness.step()
    assert [(update.start, len(update.pages)) for update in batch.page_updates] == [(0, 2)]
    assert harness.step()[0].page_updates == ()
    batch, _ = harness.step()
    assert [(update.slot, update.start, len(update.pages)) for update in batch.page_updates] == [(sequence.slot, 2, 1)]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_length_is_known_when_scheduling(max_tokens: int) -> None:
    harness = Harness()
    sequence = harness.add(4, max_tokens)
    for _ in range(max_tokens):
        assert len(harness.schedule().sampled_slots) == 1
    assert harness.scheduler.schedule() is None, "no token beyond the last"
    assert sequence.slot < 0, "slot and pages are free while the last tokens are in flight"
    harness.scheduler.check()


def test_max_model_len_ends_a_sequence() -> None:
    harness = Harness(max_model_len=10)
    sequence = harness.add(6, max_tokens=50)
    harness.run()
    assert len(sequence.tokens) == 10
    assert sequence.finish is FinishReason.LENGTH


def test_a_lone_sequence_ends_where_the_pages_do() -> None:
    harness = Harness(num_pages=2)
    sequence = harness.add(6, max_tokens=50)
    harness.run()
    assert len(sequence.tokens) == 8
    assert sequence.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("params", "token", "finish", "stop_token"),
    [
        ({}, EOS, FinishReason.STOP, None),
        ({"ignore_eos": True}, EOS, None, None),
        ({"stop_token_ids": (TOKEN,)}, TOKEN, FinishReason.STOP, TOKEN),
        ({"stop_token_ids": (EOS,)}, EOS, FinishReason.STOP, None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, FinishReason.STOP, EOS),
        ({"min_tokens": 1}, EOS, None, None),
    ],
)
def test_stop_ids(params: dict[str, object], token: int, finish: FinishReason | None, stop_token: int | None) -> None:
    harness = Harness()
    sequence = harness.add(4, **params)
    _, output = harness.step(token)
    assert output.tokens == [token], "the id that ends a sequence is part of its tokens"
    assert (sequence.finish, sequence.stop_token) == (finish, stop_token)
    assert (output.finished == [sequence]) == (finish is not None)


def test_min_tokens_hold_stop_ids_off_until_they_are_reached() -> None:
    harness = Harness()
    sequence = harness.add(4, min_tokens=2)
    for _ in range(2):
        harness.step(EOS)
        assert sequence.finish is None
    harness.step(EOS)
    assert sequence.finish is FinishReason.STOP


def test_a_stop_costs_one_discarded_token_and_its_slot_is_free_at_once() -> None:
    harness = Harness(max_num_seqs=1)
    old = harness.add(4)
    first = harness.schedule()
    second = harness.schedule()
    harness.commit(first, EOS)
    assert old.finish is FinishReason.STOP
    new = harness.add((40, 41))
    third = harness.schedule()
    assert third.assigns[0].slot == second.decodes[0], "the slot passes on with a stale token in flight"
    stale = harness.commit(second, token=55)
    assert (stale.tokens, stale.sequences) == ([], [])
    fresh = harness.commit(third)
    assert fresh.sequences == [new]
    assert list(new.tokens) == [40, 41, TOKEN]
    assert list(old.tokens)[4:] == [EOS]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_last_in_order_is_preempted_and_takes_its_token_along(policy: str) -> None:
    harness = Harness(num_pages=4, policy=policy, prefix_caching=False)
    kept = harness.add(7, arrival=2.0, priority=0) if policy == "priority" else harness.add(7, arrival=1.0)
    victim = harness.add(7, arrival=1.0, priority=5) if policy == "priority" else harness.add(7, arrival=2.0)
    harness.step()
    in_flight = harness.schedule()
    assert len(in_flight.decodes) == 2
    squeezed = harness.schedule()
    assert squeezed.decodes == (kept.slot,)
    assert victim.slot < 0
    assert harness.scheduler.stats().preemptions == 1
    harness.commit(in_flight)
    assert len(victim.tokens) == 9, "the token in flight is its own"
    harness.commit(squeezed)
    harness.run()
    assert victim.finish is kept.finish is FinishReason.LENGTH
    assert len(victim.tokens) == len(kept.tokens) == 15


def test_a_preempted_sequence_waits_for_the_token_in_flight() -> None:
    harness = Harness(num_pages=4, prefix_caching=False)
    kept, victim = harness.add(7, max_tokens=3), harness.add(7, max_tokens=20)
    harness.step()
    in_flight, last_of_kept = harness.schedule(), harness.schedule()
    assert last_of_kept.decodes == (kept.slot,)
    assert victim.slot < 0
    assert harness.scheduler.schedule() is None, "there is room again, but its newest token is not known yet"
    harness.commit(in_flight)
    harness.commit(last_of_kept)
    assert harness.schedule().prefills[0].token_ids == tuple(victim.tokens)
    assert len(victim.tokens) == 9


def test_a_resumed_sequence_prefills_its_output_too() -> None:
    harness = Harness(num_pages=4, prefix_caching=False)
    harness.add(7, max_tokens=4)
    victim = harness.add((30, 31, 32, 33, 34, 35, 36), max_tokens=6)
    resumed = None
    launched: list[Batch] = []
    while resumed is None:
        launched.append(harness.schedule())
        if len(launched) > 1:
            harness.commit(launched[-2])
        resumed = next((c for c in launched[-1].prefills if len(launched) > 1 and c.slot == victim.slot), None)
    assert resumed.start == 0
    assert resumed.token_ids == tuple(victim.tokens)
    assert len(resumed.token_ids) > victim.prompt_length


def test_a_prefix_is_shared_once_its_step_was_launched() -> None:
    harness = Harness()
    harness.add((*range(10, 20), 1))
    first = harness.schedule()
    other = harness.add((*range(10, 20), 2))
    second = harness.schedule()
    assert second.prefills[0].start == 8
    assert other.cached_tokens == 8
    assert second.page_updates[0].pages[:2] == first.page_updates[0].pages[:2]
    stats = harness.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (22, 8)


def test_same_prompts_at_once_wait_for_the_first_ones_pages() -> None:
    harness = Harness()
    sequences = [harness.add(9) for _ in range(3)]
    first = harness.schedule()
    assert len(first.prefills) == 1
    unrelated = harness.add((90, 91, 92, 93, 94))
    second = harness.schedule()
    assert [chunk.start for chunk in second.prefills] == [8, 8, 0]
    assert unrelated.slot >= 0
    assert [each.cached_tokens for each in sequences] == [0, 8, 8]


def test_a_prompt_in_the_cache_whole_runs_its_last_token_on_a_copy() -> None:
    harness = Harness()
    harness.add(8, max_tokens=1)
    first, _ = harness.step()
    harness.add(8, max_tokens=1)
    second = harness.schedule()
    assert [(chunk.start, chunk.token_ids, chunk.sample) for chunk in second.prefills] == [(7, (8,), True)]
    [(source, copy)] = second.copies
    assert source == first.page_updates[0].pages[1]
    assert second.page_updates[0].pages == (first.page_updates[0].pages[0], copy)


def test_without_room_for_the_copy_the_last_page_is_computed_again() -> None:
    harness = Harness(num_pages=2)
    harness.add(7, max_tokens=1)
    harness.step()
    sequence = harness.add((1, 2, 3, 4, 5, 6, 7), max_tokens=1)
    harness.run()
    assert sequence.cached_tokens == 4
    full = Harness(num_pages=3)
    full.add(8, max_tokens=1)
    full.step()
    holder = full.add((50, 51), max_tokens=8)
    full.step()
    late = full.add(8, max_tokens=1)
    batch = full.schedule()
    assert holder.slot >= 0
    assert batch.copies == ()
    assert late.cached_tokens == 4


def test_salts_and_prompt_logprobs_do_not_read_the_cache() -> None:
    harness = Harness()
    harness.add(9, max_tokens=1)
    harness.step()
    salted = harness.add(9, max_tokens=1, cache_salt="tenant")
    harness.step()
    scored = harness.add(9, max_tokens=1, prompt_logprobs=0)
    batch, _ = harness.step()
    assert salted.cached_tokens == scored.cached_tokens == 0
    assert batch.prefills[0].targets == (2, 3, 4, 5, 6, 7, 8, 9)


def test_targets_cross_the_boundary_of_chunks() -> None:
    harness = Harness(max_num_batched_tokens=5)
    harness.add(9, max_tokens=1, prompt_logprobs=0)
    targets = [harness.schedule().prefills[0].targets for _ in range(2)]
    assert targets == [(2, 3, 4, 5, 6), (7, 8, 9)]


def test_no_tokens_asked_for_ends_after_the_prefill() -> None:
    harness = Harness()
    sequence = harness.add(6, max_tokens=0)
    batch, output = harness.step()
    assert batch.sampled_slots == ()
    assert output.finished == output.started == [sequence]
    assert sequence.finish is FinishReason.LENGTH


def test_history_is_given_only_for_penalties() -> None:
    harness = Harness()
    harness.add(3)
    harness.add((50, 51), presence_penalty=0.5)
    plain, penalized = harness.schedule().assigns
    assert plain.history == ()
    assert (penalized.history, penalized.prompt_length) == ((50, 51), 2)


def test_seeds_are_given_or_drawn_once() -> None:
    drawn = [Harness(seed=5).add(3).seed for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert Harness(seed=6).add(3).seed != drawn[0]
    assert Harness().add(3, seed=-1).seed == (1 << 63) - 1


def test_abort_in_every_state_frees_everything() -> None:
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=4)
    states: list[Callable[[], None]] = [lambda: None, lambda: harness.schedule() and None]
    for prepare in states:
        sequences = [harness.add(10), harness.add(3), harness.add(3)]
        prepare()
        assert all(harness.scheduler.abort(each) for each in sequences)
        assert not any(harness.scheduler.abort(each) for each in sequences)
        harness.scheduler.check()
        assert harness.scheduler.stats().pages_used == 0
    assert harness.scheduler.schedule() is None


def test_failure_ends_what_ran_keeps_what_waits_and_distrusts_the_cache() -> None:
    harness = Harness(max_num_seqs=1)
    ran, waits = harness.add(9), harness.add(9, max_tokens=2)
    harness.step()
    harness.schedule()
    assert harness.scheduler.fail("broken") == [ran]
    assert (ran.finish, ran.error) == (FinishReason.ERROR, "broken")
    harness.scheduler.check()
    batch, _ = harness.step()
    assert batch.prefills[0].start == 0, "pages of a failed step are not reused"
    harness.run()
    assert waits.finish is FinishReason.LENGTH


def test_a_result_that_does_not_fit_is_an_engine_error() -> None:
    harness = Harness()
    last = harness.add(3, max_tokens=1)
    batch = harness.schedule()
    assert harness.scheduler.schedule() is None
    assert last.slot < 0
    with pytest.raises(EngineError, match="gave 2 tokens, not 1"):
        harness.scheduler.commit(batch, StepResult([1, 2]))
    assert harness.scheduler.fail("broken") == [last], "it holds nothing any more, but waits for that result"
    assert not harness.scheduler.has_work


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "word"),
    [((), 1, "empty"), ((100,), 1, "vocabulary"), ((-1,), 1, "vocabulary"), ((1,) * 64, 1, "64 tokens")],
)
def test_impossible_requests_are_refused(prompt: tuple[int, ...], max_tokens: int, word: str) -> None:
    harness = Harness()
    with pytest.raises(RequestError, match=word):
        harness.add(prompt, max_tokens)
    assert not harness.scheduler.has_work


def test_the_longest_possible_requests_run() -> None:
    for prompt, max_tokens in ((63, 1), (64, 0)):
        harness = Harness()
        sequence = harness.add(prompt, max_tokens)
        harness.run()
        assert sequence.finish is FinishReason.LENGTH


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    harness = Harness(max_queued=100, max_num_seqs=1)
    harness.add(3, max_tokens=1)
    for _ in range(99):
        harness.add(3, max_tokens=1)
    with pytest.raises(CapacityError) as full:
        harness.add(3)
    assert full.value.retry_after == 1.0
    for _ in range(20):
        harness.now += 0.5
        harness.step()
        harness.add(3, max_tokens=1)
    with pytest.raises(CapacityError) as full:
        harness.add(3)
    assert full.value.retry_after == pytest.approx(10 / 2.0, rel=0.1)


def test_decodes_must_fit_into_a_step() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 3"):
        Harness(max_num_batched_tokens=3, max_num_seqs=4)


def test_nobody_overtakes_a_sequence_that_waits_for_pages() -> None:
    harness = Harness(num_pages=4, prefix_caching=False)
    harness.add(8, max_tokens=4)
    harness.step()
    big, small = harness.add(tuple(range(20, 32))), harness.add((1, 2))
    batch = harness.schedule()
    assert batch.prefills == ()
    assert big.slot < 0
    assert small.slot < 0


def test_the_newest_is_preempted_first_even_while_it_prefills() -> None:
    harness = Harness(num_pages=8, prefix_caching=False, max_num_batched_tokens=6)
    old, older = harness.add(4, arrival=2.0), harness.add(2, arrival=1.0)
    harness.step()
    newest = harness.add(tuple(range(20, 40)), arrival=3.0)
    harness.schedule()
    assert newest.computed == 4
    assert harness.scheduler.stats().pages_used == 8
    waiting = harness.add((1,), arrival=4.0)
    batch = harness.schedule()
    while newest.slot >= 0:
        batch = harness.schedule()
    assert set(batch.decodes) == {old.slot, older.slot}
    assert batch.prefills == ()
    assert waiting.slot < 0


def test_a_new_sequence_leaves_pages_to_those_who_run() -> None:
    harness = Harness(num_pages=400, max_model_len=1600, max_num_batched_tokens=1600, prefix_caching=False)
    harness.add(1, max_tokens=1000)
    harness.step()
    tight = harness.add((2,) * (399 * 4), max_tokens=4)
    assert harness.schedule().prefills == ()
    harness.scheduler.abort(tight)
    fits = harness.add((2,) * (398 * 4), max_tokens=4)
    harness.schedule()
    assert fits.slot >= 0
