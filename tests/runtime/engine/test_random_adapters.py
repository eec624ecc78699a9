"""Random schedules with adapters through the real step loop: loaded, unloaded and crowded out while requests run.

The executor verifies that each row goes through its own adapter, that keys and values of one are never read under
another, and that what is brought to the device lies in host memory; tokens are known beforehand.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, wait

import pytest
from tests.runtime.engine.uniform_executor import UniformAdapters, UniformExecutor

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import NotFoundError, RequestError, StokerError, UnsupportedError
from stoker_runtime.request import FinishReason, Request, SamplingParams
from stoker_runtime.scheduler.sequence import Sequence

SCHEDULES = 250
NAMES = ("ada", "bo", "cy", "di", "eve")


class World:
    """A step loop over the verifying executor, and what every request must give."""

    def __init__(self, slots: int, copies: int, **sizes: int) -> None:
        self.executor = UniformExecutor(adapters=UniformAdapters(slots, copies), **sizes)  # type: ignore[arg-type]
        self.loop = StepLoop(self.executor, EngineConfig("uniform", enable_lora=True, scheduling_policy="priority"))
        self.expected: dict[Sequence, list[int]] = {}
        self.told: list[StokerError | None] = []

    def load(self, name: str, *, replace: bool = False) -> None:
        self.loop.adapters.load(name, f"/adapters/{name}", "", self.told.append, replace=replace)

    def settle(self) -> None:
        """Until every folder was read."""
        while self.loop.adapters.busy:
            self.step()

    def add(self, prompt: tuple[int, ...], tokens: int, name: str | None, priority: int = 0) -> Sequence:
        number = self.loop.adapters.served[name].number if name else 0
        seed = len(self.executor.prompts)
        params = SamplingParams(max_tokens=tokens, seed=seed)
        self.executor.prompts[seed], self.executor.adapter_of[seed] = prompt, number
        sequence = self.loop.add(Request(str(seed), prompt, params, adapter=number, priority=priority))
        capacity = self.loop.max_tokens
        self.expected[sequence] = self.executor.expected_output(prompt, params, capacity)
        return sequence

    def step(self) -> None:
        self.loop.step()
        self.loop.scheduler.check()
        self.loop.adapters.check()

    def run(self) -> None:
        while self.loop.has_work or self.loop.adapters.busy:
            self.step()
        for sequence, expected in self.expected.items():
            if sequence.finish is not FinishReason.ABORT:
                assert sequence.tokens[sequence.prompt_length :].tolist() == expected


@pytest.mark.matrix(take=1)
@pytest.mark.parametrize("block", range(8))
def test_random_schedules_with_adapters(block: int) -> None:
    for seed in range(block * SCHEDULES, (block + 1) * SCHEDULES):
        try:
            run_schedule(random.Random(seed))
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


def run_schedule(rng: random.Random) -> None:
    slots = rng.randint(1, 3)
    sizes = {"num_pages": rng.randint(12, 40), "max_num_seqs": 5, "max_num_batched_tokens": 24}
    world = World(slots, slots + rng.randint(0, 2), **sizes)
    shared = tuple(rng.randrange(1, 64) for _ in range(20))
    world.load(NAMES[0])
    world.settle()
    for _ in range(60):
        served = sorted(world.loop.adapters.served)
        chance = rng.random()
        if chance < 0.3:
            prompt = shared[: rng.randint(0, 20)] + tuple(rng.randrange(1, 64) for _ in range(rng.randint(1, 8)))
            world.add(prompt, rng.randint(1, 12), rng.choice([None, *served]), rng.choice([0, 0, 1]))
        elif chance < 0.4:
            name = rng.choice(NAMES)
            try:
                world.load(name, replace=rng.random() < 0.5)
            except RequestError:
                assert name in served or world.loop.adapters.busy
        elif chance < 0.46 and served:
            world.loop.adapters.unload(rng.choice(served))
        elif chance < 0.5 and world.expected:
            world.loop.abort(rng.choice(list(world.expected)))
        else:
            world.step()
    world.run()
    assert world.told
    assert not any(world.told)
    for name in list(world.loop.adapters.served):
        world.loop.adapters.unload(name)
    holder = world.executor.adapters
    assert holder is not None
    assert not holder.copies, "copies of adapters that nobody can ask for"


def test_no_adapter_waits_for_ever_behind_a_stream_of_others() -> None:
    world = World(1, 2, num_pages=60, max_num_seqs=2)
    for name in NAMES[:2]:
        world.load(name)
    world.settle()
    for _ in range(3):
        world.add((5, 6, 7), 9, "ada")
    other = world.add((5, 6, 7), 4, "bo")
    for _ in range(200):
        world.add((5, 6), 3, "ada")  # there is always one more of the adapter that has the slot
        world.step()
        if other.finish is not None:
            break
    assert other.finish is not None
    world.run()


def test_which_adapters_run_and_which_wait_is_told_by_name() -> None:
    world = World(2, 3, num_pages=40, max_num_seqs=4)
    for name in ("di", "bo", "eve"):
        world.load(name)
    world.settle()
    running = [world.add((7, 3, 2), 30, name) for name in ("eve", "di")]
    waiting = world.add((7, 3), 3, "bo")
    for _ in range(3):
        world.step()
    stats = world.loop.stats()
    assert (sorted(stats.running_adapters), stats.waiting_adapters) == (["di", "eve"], ("bo",))
    world.loop.adapters.unload("bo")
    world.loop.abort(running[0])
    world.step()
    while waiting.slot < 0:
        world.step()
    assert set(world.loop.stats().running_adapters) >= {"bo"}
    assert world.loop.stats().waiting_adapters == ()
    world.run()
    assert world.loop.stats().running_adapters == ()


def test_an_adapter_in_use_is_unloaded_after_its_last_request() -> None:
    world = World(2, 2)
    world.load("ada")
    world.settle()
    running = world.add((1, 2, 3), 6, "ada")
    number = running.request.adapter
    world.step()
    world.loop.adapters.unload("ada")
    holder = world.executor.adapters
    assert holder is not None
    assert number in holder.copies
    assert world.loop.stats().running_adapters == ("ada",), "it is told of by its name while it runs"
    with pytest.raises(NotFoundError, match="was unloaded"):
        world.loop.add(Request("late", (1, 2), SamplingParams(max_tokens=2), adapter=number))
    world.run()
    assert running.finish in (FinishReason.LENGTH, FinishReason.STOP)
    assert not holder.copies
    world.load("ada")
    world.settle()
    assert world.loop.adapters.served["ada"].number != number, "what it left in the prefix cache is another's"


def test_the_copy_that_goes_is_the_one_that_was_not_used_for_the_longest() -> None:
    world = World(1, 2)
    holder = world.executor.adapters
    assert holder is not None
    for name in ("bo", "eve"):
        world.load(name)
        world.settle()
    for name in ("bo", "eve", "bo"):
        world.add((8, 2, 5), 3, name)
        world.run()
    world.load("di")
    world.settle()
    served = world.loop.adapters.served
    assert set(holder.copies) == {served["bo"].number, served["di"].number}
    reads = holder.reads
    world.add((8, 2), 3, "bo")
    world.run()
    assert holder.reads == reads
    world.add((8, 2), 3, "eve")
    world.run()
    assert holder.reads == reads + 1
    assert set(holder.copies) == {served["bo"].number, served["eve"].number}


def test_a_folder_is_read_for_one_that_still_waits_for_a_slot() -> None:
    world = World(1, 3)
    holder = world.executor.adapters
    assert holder is not None
    for name in ("cy", "eve", "ada", "bo"):
        world.load(name)
        world.settle()
    number = world.loop.adapters.served["cy"].number
    assert number not in holder.copies
    reads = holder.reads
    running = world.add((6, 1, 9), 40, "eve")
    world.step()
    waiting = world.add((6, 1), 4, "cy")
    assert holder.reads == reads + 1
    wait([each.future for each in world.loop.adapters._reading])
    world.step()
    assert number in holder.copies
    assert running.finish is None
    assert waiting.slot < 0, "the only slot is another's"
    assert world.loop.stats().waiting_adapters == ("cy",)
    world.run()
    assert holder.reads == reads + 1


def test_nobody_waits_for_a_folder_that_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 2)
    holder, let_go = world.executor.adapters, threading.Event()
    assert holder is not None
    slowly: Future[UniformAdapters] = Future()
    monkeypatch.setattr(holder, "begin", lambda number, path: slowly)
    world.load("ada")
    running = world.add((1, 2, 3), 30, None)
    # Nobody sets the folder's result: were there a wait for it, nothing here would end.
    guard = threading.Timer(30, let_go.set)
    guard.start()
    while running.finish is None and not let_go.is_set():
        world.step()
    guard.cancel()
    assert running.finish is not None, "a text waited for a folder"
    assert world.loop.adapters.busy
    assert not world.told
    slowly.set_result(holder)
    world.settle()
    assert world.told == [None]
    world.add((4, 5), 3, "ada")
    world.run()


def test_a_load_that_fails_leaves_everything_as_it_was() -> None:
    world = World(1, 1)
    world.load("ada")
    world.settle()
    before = dict(world.loop.adapters.served)
    for name, replace in (("bo", False), ("ada", True)):
        world.loop.adapters.load(name, "bad folder", "", world.told.append, replace=replace)
        world.settle()
        assert isinstance(world.told[-1], RequestError)
        assert "it is bad" in world.told[-1].message
    assert world.loop.adapters.served == before
    world.add((4, 5), 5, "ada")
    world.run()


def test_an_adapter_that_cannot_be_read_again_ends_its_requests_alone() -> None:
    world = World(1, 1)
    for name in NAMES[:2]:
        world.load(name)
        world.settle()
    adapter = world.loop.adapters.served["ada"]
    world.loop.adapters._known[adapter.number] = type(adapter)(adapter.number, adapter.name, "bad now")
    lost, kept = world.add((1, 2, 3), 4, "ada"), world.add((1, 2, 3), 4, "bo")
    expected = world.expected.pop(lost)
    world.run()
    assert expected
    assert lost.finish is FinishReason.ERROR
    assert "cannot be read again" in (lost.error or "")
    assert kept.finish is not FinishReason.ERROR


def test_without_room_for_adapters_there_are_none() -> None:
    loop = StepLoop(UniformExecutor(), EngineConfig("uniform"))
    with pytest.raises(UnsupportedError, match="--enable-lora"):
        loop.adapters.load("ada", "/ada", "", lambda error: None)
    with pytest.raises(NotFoundError):
        loop.add(Request("r", (1,), SamplingParams(), adapter=3))
