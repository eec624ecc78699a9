"""The orders of the policies, and the waiting queue."""

from __future__ import annotations

import pytest

from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.scheduler.policy import POLICIES, SJF_AGEING, WaitingQueue
from stoker_runtime.scheduler.sequence import Sequence


def request(name: str, prompt: int = 4, arrival: float = 0.0, priority: int = 0, max_tokens: int = 16) -> Request:
    return Request(name, tuple(range(prompt)), SamplingParams(max_tokens=max_tokens), arrival, priority)


EARLY_LONG = request("early-long", prompt=1000, arrival=1.0)
LATE_SHORT = request("late-short", prompt=4, arrival=2.0)
LATEST_URGENT = request("latest-urgent", prompt=100, arrival=3.0, priority=-1)


@pytest.mark.parametrize(
    ("policy", "first_to_last"),
    [
        ("fcfs", ["early-long", "late-short", "latest-urgent"]),
        ("priority", ["latest-urgent", "early-long", "late-short"]),
        ("sjf", ["late-short", "early-long", "latest-urgent"]),
    ],
)
def test_order(policy: str, first_to_last: list[str]) -> None:
    order = POLICIES[policy]
    ranked = sorted(
        (order(each, serial), each.id) for serial, each in enumerate([LATEST_URGENT, LATE_SHORT, EARLY_LONG])
    )
    assert [name for _, name in ranked] == first_to_last


def test_equal_requests_keep_their_order_of_arrival() -> None:
    for order in POLICIES.values():
        assert order(LATE_SHORT, 1) < order(LATE_SHORT, 2)


def test_a_long_job_ages_past_short_ones() -> None:
    order, long = POLICIES["sjf"], request("long", prompt=10_000, arrival=0.0)
    soon, late = (request("short", arrival=seconds) for seconds in (1.0, 10_000 / SJF_AGEING + 1))
    assert order(soon, 1) < order(long, 0) < order(late, 2)


def sequence(name: str, rank: int) -> Sequence:
    made = Sequence(request(name), limit=20, stops=frozenset(), seed=0, root=b"")
    made.order = (rank,)
    return made


def test_queue_gives_the_best_first_and_skips_the_discarded() -> None:
    queue = WaitingQueue()
    a, b, c = (sequence(name, rank) for name, rank in (("a", 3), ("b", 1), ("c", 2)))
    for each in (a, b, c):
        queue.push(each)
    queue.discard(c)
    queue.discard(c)
    assert len(queue) == 2
    assert queue.members() == [b, a]
    assert queue.pop() is b
    queue.push(b)
    assert [queue.pop(), queue.pop(), queue.pop()] == [b, a, None]
    assert len(queue) == 0
