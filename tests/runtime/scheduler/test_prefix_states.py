"""States of prefixes: where chunks end, what is kept, and from where the next prompt goes on. Pages of four tokens."""

from __future__ import annotations

import pytest
from tests.runtime.scheduler.harness import Harness

from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.step.batch import Batch

SLOTS = 3


def harness(**sizes: object) -> Harness:
    given = {"snapshots": 5, "shares_prompts": False, "max_num_seqs": SLOTS, "num_pages": 40, **sizes}
    return Harness(**given)


def prompt(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def run(device: Harness, *prompts: tuple[int, ...]) -> list[Batch]:
    """The batches with prefills until these prompts, added at once, have ended."""
    sequences = [device.add(each, max_tokens=3) for each in prompts]
    batches = []
    while any(each.finish is None for each in sequences):
        batches.append(device.step()[0])
    return batches


def chunks(batches: list[Batch]) -> list[tuple[int, int]]:
    """(first position, tokens) of each chunk."""
    return [(chunk.start, len(chunk.token_ids)) for batch in batches for chunk in batch.prefills]


@pytest.mark.parametrize(("tokens", "cut"), [(13, 12), (12, 8), (5, 4)])
def test_a_prompt_goes_on_where_its_last_whole_page_ended(tokens: int, cut: int) -> None:
    device = harness()
    first = run(device, prompt(1, tokens))
    assert chunks(first) == [(0, cut), (cut, tokens - cut)]
    assert first[0].state_saves == first[0].state_loads == ()
    [(slot, row)] = first[1].state_saves
    assert slot == first[0].prefills[0].slot
    assert SLOTS <= row < SLOTS + 5
    again = device.add(prompt(1, tokens), max_tokens=3)
    batch, _ = device.step()
    assert chunks([batch]) == [(cut, tokens - cut)]
    assert batch.state_loads == ((row, again.slot),)
    assert batch.num_tokens == tokens - cut
    assert again.cached_tokens == cut
    stats = device.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (2 * tokens, cut)


def test_a_prompt_of_less_than_a_page_is_not_cut() -> None:
    device = harness()
    assert chunks(run(device, prompt(1, 3))) == [(0, 3)]


def test_few_tokens_are_not_worth_a_step() -> None:
    device = harness(snapshot_tokens=8)
    assert chunks(run(device, prompt(1, 8))) == [(0, 8)]
    assert chunks(run(device, prompt(31, 9))) == [(0, 8), (8, 1)]
    # Four more than were there.
    assert chunks(run(device, prompt(31, 14))) == [(8, 6)]
    # Where two prompts part, and four tokens on.
    run(device, (*prompt(61, 9), *prompt(80, 4)))
    assert chunks(run(device, (*prompt(61, 9), *prompt(90, 4)))) == [(0, 8), (8, 5)]


def test_chunks_end_where_pages_do() -> None:
    device = harness(max_num_batched_tokens=10)
    batches = run(device, prompt(1, 23))
    assert chunks(batches) == [(0, 8), (8, 8), (16, 4), (20, 3)]
    # Of its answer one page more.
    saved = [row for batch in batches for _, row in batch.state_saves]
    assert len(saved) == len(set(saved)) == 4
    # One that parts from it within the second chunk goes on behind the first.
    assert chunks(run(device, (*prompt(1, 10), *prompt(70, 4))))[0] == (8, 4)


def test_where_two_prompts_part_a_third_one_goes_on() -> None:
    device = harness()
    shared = prompt(1, 9)
    assert chunks(run(device, (*shared, *prompt(40, 5)))) == [(0, 12), (12, 2)]
    # Of the second its two shared pages are there, and no state at their end.
    assert chunks(run(device, (*shared, *prompt(50, 5)))) == [(0, 8), (8, 4), (12, 2)]
    assert chunks(run(device, (*shared, *prompt(60, 5)))) == [(8, 4), (12, 2)]


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    device = harness()
    assert sorted(chunks(run(device, *[prompt(1, 13)] * 3))) == [(0, 12), (12, 1), (12, 1), (12, 1)]


def test_what_is_given_up_is_computed_again() -> None:
    device = harness(snapshots=1)
    run(device, prompt(1, 13))
    run(device, prompt(31, 13))
    assert chunks(run(device, prompt(31, 13))) == [(12, 1)]
    # Its pages are there, and no state: at their end it is kept once more.
    assert chunks(run(device, prompt(1, 13))) == [(0, 12), (12, 1)]
    assert chunks(run(device, prompt(1, 13))) == [(12, 1)]


def test_states_go_with_their_pages() -> None:
    device = harness(num_pages=5)
    run(device, prompt(1, 13))
    run(device, prompt(31, 17))
    assert chunks(run(device, prompt(1, 13))) == [(0, 12), (12, 1)]


@pytest.mark.parametrize("more", [{"cache_salt": "other"}, {"adapter": 6}])
def test_adapters_and_salts_have_states_of_their_own(more: dict[str, object]) -> None:
    device = harness(adapter_slots=2)
    run(device, prompt(1, 13))
    other = device.add(prompt(1, 13), max_tokens=3, **more)
    assert chunks([device.step()[0]]) == [(0, 12)]
    assert other.cached_tokens == 0
    device.run()
    again = device.add(prompt(1, 13), max_tokens=3, **more)
    device.run()
    assert again.cached_tokens == 12


@pytest.mark.parametrize(("session", "found"), [("", 0), ("talk", 12)])
def test_a_session_comes_back_to_its_states(session: str, found: int) -> None:
    device = harness(snapshots=2)
    for tokens, owner in ((prompt(1, 13), session), (prompt(21, 13), ""), (prompt(41, 13), ""), (prompt(61, 13), "")):
        device.scheduler.add(Request("r", tokens, SamplingParams(max_tokens=2), session=owner))
        device.run()
    again = device.add(prompt(1, 13), max_tokens=2)
    device.run()
    assert again.cached_tokens == found


def test_after_a_failure_nothing_is_trusted() -> None:
    device = harness()
    run(device, prompt(1, 13))
    device.add(prompt(1, 13))
    device.schedule()
    device.scheduler.fail("broken")
    device.scheduler.check()
    batches = run(device, prompt(1, 13))
    assert chunks(batches)[0] == (0, 12)
    assert batches[0].state_loads == ()


def test_a_text_is_gone_on_with_where_its_last_page_began() -> None:
    """Of a prompt of 10 tokens and an answer: states are kept at 8, and where the answer begins pages, at 12 and 16."""
    device = harness()
    first = device.add(prompt(1, 10), max_tokens=8)
    saves = []
    while first.finish is None:
        saves += device.step()[0].state_saves
    assert len(saves) == 3
    again = (*first.tokens, *prompt(60, 4))
    assert chunks(run(device, again)) == [(16, 4), (20, 2)]
    # In full rows it takes nobody's place.
    busy = harness(snapshots=1)
    first = busy.add(prompt(1, 10), max_tokens=8)
    while first.finish is None:
        busy.step()
    assert chunks(run(busy, (*first.tokens, *prompt(60, 4))))[0][0] == 8


def test_who_is_preempted_where_a_page_begins_goes_on_there() -> None:
    device = harness(num_pages=6, max_num_seqs=2)
    sequences = [device.add(prompt(1, 9), max_tokens=8), device.add(prompt(31, 9), max_tokens=8)]
    seen = []
    while any(each.finish is None for each in sequences):
        seen.append(device.step()[0])
    assert device.scheduler.stats().preemptions > 0
    came_back = [chunk for batch in seen for chunk in batch.prefills if chunk.start == 12]
    assert came_back, "what was computed before is computed again"
