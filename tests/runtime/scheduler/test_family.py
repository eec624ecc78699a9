"""Choices of one prompt: one computes it, the others take its pages and copy the last one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from stoker_runtime.request import FinishReason, Request, SamplingParams
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.result import StepResult

PAGE = 4


def scheduler(*, num_pages: int = 64, slots: int = 8, caching: bool = False) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_pages=num_pages,
            page_size=PAGE,
            max_num_seqs=slots,
            max_model_len=64,
            max_num_batched_tokens=16,
            vocab_size=100,
            prefix_caching=caching,
        )
    )


def add(to: Scheduler, name: str, length: int = 10, *, family: str = "f", first: int = 1, **params: int) -> Sequence:
    prompt = (first, *range(2, length + 1))
    return to.add(Request(name, prompt, SamplingParams(max_tokens=6, **params), family=family))  # type: ignore[arg-type]


def step(of: Scheduler) -> Batch:
    batch = of.schedule()
    assert batch is not None
    of.commit(batch, StepResult([7] * len(batch.sampled_slots)))
    of.check()
    return batch


def run(whole: Scheduler) -> None:
    """To idle, one step ahead."""
    launched: Batch | None = None
    while whole.has_work:
        batch = whole.schedule()
        if launched is not None:
            whole.commit(launched, StepResult([7] * len(launched.sampled_slots)))
        launched = batch
        whole.check()


def prompt_tokens(batch: Batch) -> int:
    return sum(len(chunk.token_ids) for chunk in batch.prefills)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [4, 5, 10, 12])
def test_the_prompt_is_computed_once_and_its_pages_are_shared(length: int, caching: bool) -> None:
    running = scheduler(caching=caching)
    members = [add(running, f"r{at}", length) for at in range(4)]
    first = step(running)
    assert prompt_tokens(first) == length, "one computes the prompt, the others wait"
    second = step(running)
    assert [(chunk.start, len(chunk.token_ids)) for chunk in second.prefills] == [(length - 1, 1)] * 3
    whole, rest = divmod(length - 1, PAGE)
    assert len(second.copies) == (3 if rest else 0)
    assert {source for source, _ in second.copies} <= {members[0].pages[whole]}
    for one, other in pairwise(members):
        assert one.pages[:whole] == other.pages[:whole]
        assert one.pages[whole] != other.pages[whole]
    run(running)
    assert {member.finish for member in members} == {FinishReason.LENGTH}


def test_a_long_prompt_holds_the_others_back_until_it_is_there() -> None:
    running = scheduler()
    members = [add(running, f"r{at}", 40) for at in range(2)]
    assert [prompt_tokens(step(running)) for _ in range(4)] == [16, 16, 8, 1]
    assert members[1].pages[:9] == members[0].pages[:9]


def test_one_that_comes_late_takes_the_pages_of_any_member_that_runs() -> None:
    running = scheduler()
    first = add(running, "first")
    second = add(running, "second")
    step(running)
    step(running)
    running.abort(first)
    third = add(running, "third")
    batch = step(running)
    assert prompt_tokens(batch) == 1
    assert third.pages[:2] == second.pages[:2]
    running.abort(second)
    running.abort(third)
    last = add(running, "last")
    assert prompt_tokens(step(running)) == 10, "nobody is left who holds the prompt"
    assert last.slot >= 0


def test_without_a_slot_it_waits_and_forks_later() -> None:
    running = scheduler(slots=1)
    members = [add(running, f"r{at}") for at in range(2)]
    run(running)
    assert all(len(member.tokens) == 16 for member in members)


def test_who_is_no_member_computes_alone() -> None:
    running = scheduler()
    add(running, "a")
    step(running)
    add(running, "another prompt", first=9)
    assert prompt_tokens(step(running)) == 10
    add(running, "no family", family="")
    assert prompt_tokens(step(running)) == 10
    scored = add(running, "scores its prompt", prompt_logprobs=0)
    assert prompt_tokens(step(running)) == 10
    assert scored.scored == 9


def test_a_preempted_member_comes_back_by_its_familys_pages() -> None:
    running = scheduler(num_pages=10)
    members = [add(running, f"r{at}", 13) for at in range(4)]
    run(running)
    assert running.stats().preemptions > 0
    assert all(len(member.tokens) == 19 for member in members)
    assert {member.finish for member in members} == {FinishReason.LENGTH}
