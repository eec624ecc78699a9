"""What a session leaves in the prefix cache outlives what others leave there."""

from __future__ import annotations

import pytest

from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.step.result import StepResult


def run(scheduler: Scheduler, prompt: tuple[int, ...], session: str = "") -> int:
    """Run one request to its end; its tokens that came from the cache."""
    sequence = scheduler.add(Request("r", prompt, SamplingParams(max_tokens=2), session=session))
    while scheduler.has_work:
        batch = scheduler.schedule()
        if batch is not None:
            scheduler.commit(batch, StepResult([7] * len(batch.sampled_slots)))
        scheduler.check()
    return sequence.cached_tokens


@pytest.mark.parametrize(("session", "found"), [("", 0), ("talk", 12)])
def test_a_session_comes_back_to_its_prefix(session: str, found: int) -> None:
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=12,
            page_size=4,
            max_num_seqs=2,
            max_model_len=48,
            max_num_batched_tokens=48,
            vocab_size=100,
        )
    )
    prompt = tuple(range(1, 14))
    run(scheduler, prompt, session)
    for other in range(5):
        run(scheduler, tuple(range(20 + other, 40 + other)))
    assert run(scheduler, prompt, session) == found
