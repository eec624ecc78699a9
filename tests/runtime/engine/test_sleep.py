"""Sleep as clients of an engine process meet it: nothing is lost, nothing runs asleep, every order is answered."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from tests.runtime.engine.uniform_executor import UniformExecutor

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.engine.group import EngineGroup
from stoker_runtime.engine.messages import Step
from stoker_runtime.engine.stream import TokenStream
from stoker_runtime.errors import AsleepError, EngineDeadError, NotFoundError, RequestError, UnavailableError
from stoker_runtime.request import FinishReason, Request, SamplingParams, TokenOutput

CORE = Path(__file__).parent / "uniform_core.py"
PATIENCE = 30
PROMPT = tuple(range(1, 50))


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    command = (sys.executable, str(CORE), "sleepy", str(tmp_path))
    found = await AsyncEngine.start(EngineConfig(model="uniform"), command=command, log_level="error")
    yield found
    await found.close()


def request(name: str, max_tokens: int = 8) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=len(name) + max_tokens)
    return Request(name, PROMPT, params, arrival=time.monotonic())


async def read(stream: TokenStream) -> list[TokenOutput]:
    """The outputs of a stream of one request."""
    outputs: list[TokenOutput] = []
    while not outputs or outputs[-1].finish is None:
        outputs += await asyncio.wait_for(stream.next(), PATIENCE)
    return outputs


async def answer(engine: AsyncEngine, asked: Request) -> list[int]:
    return [token for output in await read(engine.submit([asked])) for token in output.tokens]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.01)


def truth(asked: Request) -> list[int]:
    return UniformExecutor().expected_output(asked.prompt_token_ids, asked.params, 4096)


async def test_what_runs_ends_whole_and_what_comes_is_refused(engine: AsyncEngine) -> None:
    """By this process at once, and by one that has not heard of it by the engine itself."""
    asked = request("running", 60)
    stream = engine.submit([asked])
    first = await asyncio.wait_for(stream.next(), PATIENCE)
    other = await AsyncEngine.attach(engine.endpoints[0])
    try:
        falling = asyncio.create_task(engine.sleep(1))
        await until(lambda: bool(engine.stats().sleep_level))
        with pytest.raises(AsleepError) as refused:
            engine.submit([request("late")])
        assert (refused.value.status, refused.value.code) == (503, "server_asleep")
        other._ledger.stats.sleep_level = 0
        with pytest.raises(AsleepError) as refused:
            await answer(other, request("late"))
        assert refused.value.retry_after == AsleepError.retry_after
        assert not engine.stats().asleep
        outputs = [*first, *await read(stream)]
        assert [token for output in outputs for token in output.tokens] == truth(asked)
        assert outputs[-1].finish is FinishReason.LENGTH
        await asyncio.wait_for(falling, PATIENCE)
        await until(lambda: bool(other.stats().asleep))
        assert (engine.stats().asleep, engine.stats().sleep_level, engine.stats().bytes_freed) == (True, 1, 2000)
        await other.wake_up()
        assert await answer(other, request("again")) == truth(request("again"))
        await until(lambda: not engine.stats().sleep_level)
        assert engine.stats().bytes_freed == 0
    finally:
        await other.close()


async def test_nothing_cached_is_used_again(engine: AsyncEngine) -> None:
    """The executor sees to it that a page which lost its content is not read."""
    for name in ("cold", "warm"):
        assert await answer(engine, request(name)) == truth(request(name))
    hits = engine.stats().prefix_hits
    assert hits > 0
    await engine.sleep(2)
    await engine.wake_up()
    assert await answer(engine, request("after")) == truth(request("after"))
    assert engine.stats().prefix_hits == hits
    assert await answer(engine, request("warm again")) == truth(request("warm again"))
    assert engine.stats().prefix_hits > hits


async def test_orders_one_after_the_other(engine: AsyncEngine) -> None:
    """Twice the same is once; a deeper level is gone down to, and never up from; parts wake by themselves."""
    await engine.wake_up()
    await engine.sleep(1)
    await engine.sleep(1)
    assert (engine.stats().sleep_level, engine.stats().host_weight_bytes) == (1, 500)
    await engine.sleep(2)
    await engine.sleep(1)
    assert (engine.stats().sleep_level, engine.stats().host_weight_bytes) == (2, 0)
    await engine.wake_up(["weights"])
    assert (engine.stats().asleep, engine.stats().bytes_freed) == (True, 1000)
    with pytest.raises(AsleepError):
        engine.submit([request("between")])
    await engine.wake_up(["kv_cache"])
    await engine.wake_up()
    assert not engine.stats().asleep
    ends = await asyncio.gather(*(engine.sleep(1) if at % 2 else engine.wake_up() for at in range(9)),
                                return_exceptions=True)  # fmt: skip
    assert all(end is None or getattr(end, "code", "") == "woken_up" for end in ends), ends
    await engine.wake_up()
    assert await answer(engine, request("awake")) == truth(request("awake"))


async def test_a_sleep_that_waits_is_called_off(engine: AsyncEngine) -> None:
    asked = request("long", 4000)
    stream = engine.submit([asked])
    await asyncio.wait_for(stream.next(), PATIENCE)
    falling = asyncio.create_task(engine.sleep(2))
    await until(lambda: bool(engine.stats().sleep_level))
    await engine.wake_up()
    with pytest.raises(RequestError, match="woken up before it slept"):
        await falling
    assert await answer(engine, request("beside")) == truth(request("beside"))
    engine.abort(["long"])


async def test_abort_ends_what_runs_and_what_waits(engine: AsyncEngine) -> None:
    streams = [engine.submit([request(f"{at}", 4000)]) for at in range(12)]
    await asyncio.wait_for(streams[0].next(), PATIENCE)
    await engine.sleep(1, abort=True)
    assert engine.stats().asleep
    for outputs in await asyncio.gather(*map(read, streams)):
        assert outputs[-1].finish is FinishReason.ABORT
    await engine.wake_up()
    assert await answer(engine, request("next")) == truth(request("next"))
    await until(lambda: engine.stats().pages_used == 0)


async def test_who_cannot_says_so_and_stays(engine: AsyncEngine, tmp_path: Path) -> None:
    """Awake, or asleep."""
    refuses = tmp_path / "refuses"
    refuses.touch()
    with pytest.raises(UnavailableError, match="no room"):
        await engine.sleep(1)
    assert await answer(engine, request("still awake")) == truth(request("still awake"))
    refuses.unlink()
    await engine.sleep(1)
    refuses.touch()
    with pytest.raises(UnavailableError, match="no room"):
        await engine.wake_up()
    assert engine.stats().asleep
    with pytest.raises(AsleepError):
        engine.submit([request("too early")])
    refuses.unlink()
    await engine.wake_up()
    assert await answer(engine, request("awake")) == truth(request("awake"))


async def test_a_slow_wake_up_is_no_hang(engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats go on, so whoever probes is told that all is well."""
    await engine.sleep(1)
    (tmp_path / "busy").touch()
    waking = asyncio.create_task(engine.wake_up())
    await until((tmp_path / "working").exists)
    beats: list[float] = []
    take = engine._ledger.take

    def count(step: Step) -> None:
        beats.append(time.monotonic())
        take(step)

    monkeypatch.setattr(engine._ledger, "take", count)
    await until(lambda: len(beats) >= 3)
    engine.check_health()
    assert engine.stats().asleep
    (tmp_path / "busy").unlink()
    await asyncio.wait_for(waking, PATIENCE)
    assert await answer(engine, request("awake")) == truth(request("awake"))


async def test_a_sleeper_that_dies_is_dead(engine: AsyncEngine) -> None:
    await engine.sleep(1)
    waking = asyncio.create_task(engine.wake_up(["weights"]))
    os.kill(engine.ready.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await asyncio.wait_for(asyncio.gather(waking, engine.wake_up()), PATIENCE)
    with pytest.raises(EngineDeadError):
        engine.check_health()


async def test_several_engines_sleep_together(tmp_path: Path) -> None:
    """Where one cannot, none does."""
    folders = [tmp_path / "a", tmp_path / "b"]
    engines = []
    for folder in folders:
        folder.mkdir()
        command = (sys.executable, str(CORE), "sleepy", str(folder))
        engines.append(AsyncEngine.start(EngineConfig(model="uniform"), command=command, log_level="error"))
    group = EngineGroup(await asyncio.gather(*engines))
    try:
        (folders[1] / "refuses").touch()
        with pytest.raises(UnavailableError, match="no room"):
            await group.sleep(1)
        assert not group.stats().asleep
        (folders[1] / "refuses").unlink()
        await group.sleep(1)
        assert all(each.stats().asleep for each in group.engines)
        await group.wake_up()
        assert not group.stats().sleep_level
    finally:
        await group.close()


async def test_what_it_was_not_started_for(tmp_path: Path) -> None:
    command = (sys.executable, str(CORE), "ok")
    async with await AsyncEngine.start(EngineConfig(model="uniform"), command=command, log_level="error") as engine:
        with pytest.raises(NotFoundError, match="enable-sleep-mode"):
            await engine.sleep(1)
        with pytest.raises(NotFoundError, match="enable-sleep-mode"):
            await engine.wake_up()


async def test_orders_that_are_none(engine: AsyncEngine) -> None:
    with pytest.raises(RequestError, match="level is 3"):
        await engine.sleep(3)
    with pytest.raises(RequestError, match="weights and kv_cache"):
        await engine.wake_up(["head"])
    assert await answer(engine, request("unmoved")) == truth(request("unmoved"))
