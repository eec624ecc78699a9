"""queue.py: once each, never twice at a time, failures later, and not too fast."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from prometheus_client import generate_latest

from stoker_operator.cluster import queue as queue_module
from stoker_operator.cluster.queue import Key, WorkQueue


async def drain(work: WorkQueue, seconds: float) -> None:
    task = asyncio.create_task(work.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_key_added_often_is_done_once() -> None:
    seen = []

    async def work(namespace: str, name: str) -> None:
        seen.append(name)

    queue = WorkQueue(work, workers=4, per_second=1000)
    for _ in range(20):
        await queue.add(("n", "a"))
        await queue.add(("n", "b"))
    await drain(queue, 0.1)
    assert sorted(seen) == ["a", "b"]


async def test_a_key_is_never_worked_on_twice_at_once_and_not_forgotten() -> None:
    running, most, count = 0, 0, 0

    async def work(namespace: str, name: str) -> None:
        nonlocal running, most, count
        running, count = running + 1, count + 1
        most = max(most, running)
        if count == 1:
            await queue.add(("n", "a"))
        await asyncio.sleep(0.05)
        running -= 1

    queue = WorkQueue(work, workers=4, per_second=1000)
    await queue.add(("n", "a"))
    await drain(queue, 0.3)
    assert (most, count) == (1, 2)


async def test_different_keys_run_side_by_side() -> None:
    both = asyncio.Barrier(2)

    async def work(namespace: str, name: str) -> None:
        await asyncio.wait_for(both.wait(), 1)

    queue = WorkQueue(work, workers=2, per_second=1000)
    await queue.add(("n", "a"))
    await queue.add(("n", "b"))
    await drain(queue, 0.2)
    assert not both.broken


async def test_what_is_asked_for_again_comes_again() -> None:
    seen = []

    async def work(namespace: str, name: str) -> float | None:
        seen.append(time.monotonic())
        return 0.05 if len(seen) < 3 else None

    queue = WorkQueue(work, workers=1, per_second=1000)
    await queue.add(("n", "a"))
    await drain(queue, 0.4)
    assert len(seen) == 3
    assert seen[1] - seen[0] >= 0.05


async def test_a_failure_comes_again_later_and_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(queue_module, "LONGEST_BACKOFF_SECONDS", 0.004)
    seen: list[str] = []
    delays: list[float] = []
    recovered = asyncio.Event()

    async def work(namespace: str, name: str) -> None:
        seen.append(name)
        if name == "good":
            return
        if seen.count("bad") <= 4:
            raise RuntimeError("no")
        recovered.set()

    queue = WorkQueue(work, workers=1, per_second=100_000)
    add = queue.add

    async def noting(key: Key, after: float = 0.0) -> None:
        delays.append(after)
        await add(key, after)

    monkeypatch.setattr(queue, "add", noting)
    await add(("n", "bad"))
    await add(("n", "good"))
    task = asyncio.create_task(queue.run())
    await asyncio.wait_for(recovered.wait(), 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen.index("good") < 5  # not after the failures are over
    assert delays == [0.001, 0.002, 0.004, 0.004]  # doubling, up to the longest; none after the success


async def test_the_rate_bounds_all_keys_together() -> None:
    seen = []

    async def work(namespace: str, name: str) -> None:
        seen.append(name)

    queue = WorkQueue(work, workers=8, per_second=20)
    for index in range(50):
        await queue.add(("n", str(index)))
    await drain(queue, 0.5)
    assert 5 <= len(seen) <= 11


async def test_an_earlier_wish_wins() -> None:
    seen = []

    async def work(namespace: str, name: str) -> None:
        seen.append(name)

    queue = WorkQueue(work, workers=1, per_second=1000)
    await queue.add(("n", "a"), after=60)
    await queue.add(("n", "a"))
    await queue.add(("n", "a"), after=60)
    await drain(queue, 0.1)
    assert seen == ["a"]


async def test_a_hanging_reconcile_is_seen() -> None:
    async def work(namespace: str, name: str) -> None:
        await asyncio.sleep(60)

    queue = WorkQueue(work, workers=1, per_second=1000)
    assert queue.longest_active == 0
    await queue.add(("n", "a"))
    task = asyncio.create_task(queue.run())
    await asyncio.sleep(0.1)
    assert 0.05 < queue.longest_active < 5
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_many_keys_and_workers_do_each_key_once() -> None:
    seen: list[str] = []
    done = asyncio.Event()

    async def work(namespace: str, name: str) -> None:
        await asyncio.sleep(0)
        seen.append(name)
        if len(seen) >= 500:
            done.set()

    queue = WorkQueue(work, workers=16, per_second=1_000_000)
    task = asyncio.create_task(queue.run())
    for index in range(500):
        await queue.add(("n", str(index)), after=0.001 * (index % 3))
    await asyncio.wait_for(done.wait(), 30)
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sorted(seen) == sorted(str(index) for index in range(500))
    assert len(queue) == 0


async def test_what_waits_is_counted_for_who_asks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = 0
    plain = WorkQueue.__len__

    def count(self: WorkQueue) -> int:
        nonlocal counted
        counted += 1
        return plain(self)

    async def work(namespace: str, name: str) -> None:
        done.append(name)
        if len(done) == 30:
            enough.set()
            await asyncio.sleep(60)

    done: list[str] = []
    enough = asyncio.Event()
    monkeypatch.setattr(WorkQueue, "__len__", count)
    queue = WorkQueue(work, workers=1, per_second=100000)
    for number in range(77):
        await queue.add(("n", str(number)))
    running = asyncio.create_task(queue.run())
    await asyncio.wait_for(enough.wait(), 60)
    assert counted == 0, "each key costs more, the more there are"
    assert b"stoker_queue_length 47.0" in generate_latest()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_it_ends_when_it_is_cancelled_however_many_keys_come() -> None:
    """A replica that lost its lease must not act, nor hang as one that neither leads nor ends."""
    chosen = random.Random(20)

    async def work(namespace: str, name: str) -> None:
        await asyncio.sleep(chosen.random() / 300)

    async def load(queue: WorkQueue) -> None:
        while True:
            await queue.add(("n", str(chosen.randrange(9))), chosen.choice((0, 0.001)))
            await asyncio.sleep(chosen.choice((0, 0.0005)))

    for _ in range(30):
        queue = WorkQueue(work, workers=8, per_second=chosen.choice((200, 5000)))
        running = asyncio.create_task(queue.run())
        loads = [asyncio.create_task(load(queue)) for _ in range(4)]
        await asyncio.sleep(chosen.random() / 20)
        assert not running.done()
        running.cancel()
        ended, _ = await asyncio.wait([running], timeout=10)
        for each in loads:
            each.cancel()
        assert ended, "it works on"
        await asyncio.gather(*loads, return_exceptions=True)


async def order_of(*adds: tuple[str, float, bool]) -> list[str]:
    """Names in the order in which one worker takes them, of (name, seconds after which it is due, routine)."""
    seen: list[str] = []
    done = asyncio.Event()

    async def work(namespace: str, name: str) -> None:
        seen.append(name)
        if len(seen) == len({name for name, _, _ in adds}):
            done.set()

    queue = WorkQueue(work, workers=1, per_second=100_000)
    for name, after, routine in adds:
        await queue.add(("n", name), after, routine=routine)
    task = asyncio.create_task(queue.run())
    await asyncio.wait_for(done.wait(), 20)
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(queue) == 0
    return seen


async def test_a_change_goes_before_the_round_of_all() -> None:
    names = [f"round-{number}" for number in range(random.randint(20, 60))]
    seen = await order_of(*((name, 0.0, True) for name in names), ("changed", 0.0, False), (names[-1], 0.0, False))
    assert seen == ["changed", names[-1], *names[:-1]]


async def test_the_round_of_all_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "ROUTINE_WAITS_SECONDS", 5.0)
    waited, fresh = ("waited", -5.5, True), ("fresh", -4.5, True)
    assert await order_of(waited, fresh, ("changed", 0.0, False)) == ["waited", "changed", "fresh"]


async def test_what_is_due_later_holds_up_nothing_that_is_due_now() -> None:
    assert await order_of(("later", 0.2, False), ("round", 0.0, True)) == ["round", "later"]
    assert await order_of(("round", 0.2, True), ("now", 0.0, False)) == ["now", "round"]


async def test_many_adds_of_one_key_are_not_piled_up() -> None:
    async def work(namespace: str, name: str) -> None:
        raise AssertionError(name)

    queue = WorkQueue(work, workers=1, per_second=1000)
    for number in range(500):
        await queue.add(("n", "a"), 100.0 + number % 7, routine=number % 2 == 0)
    assert sum(len(lane.order) for lane in queue._lanes) < 20
