"""The engine process and its front: tokens, crashes, hangs, slow consumers, aborts, drain, several API processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.runtime.engine.uniform_executor import UniformExecutor

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine import engine as front
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.engine.stream import TokenStream
from stoker_runtime.errors import (
    CapacityError,
    EngineDeadError,
    EngineError,
    ModelError,
    RequestError,
    UnavailableError,
)
from stoker_runtime.process.stat import process_exists, processor_seconds
from stoker_runtime.request import FinishReason, Request, SamplingParams, TokenOutput

CORE = Path(__file__).parent / "uniform_core.py"
CONFIG = EngineConfig(model="uniform")
Starter = Callable[..., Awaitable[AsyncEngine]]


def command(mode: str) -> list[str]:
    return [sys.executable, str(CORE), mode]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Starter]:
    engines: list[AsyncEngine] = []

    async def starter(mode: str = "ok", config: EngineConfig = CONFIG, hang_seconds: float = 30.0) -> AsyncEngine:
        engine = await AsyncEngine.start(config, command=command(mode), hang_seconds=hang_seconds, log_level="error")
        engines.append(engine)
        return engine

    yield starter
    for engine in engines:
        if process_exists(engine.ready.pid):
            os.kill(engine.ready.pid, signal.SIGCONT)
        await engine.close()


def request(name: str, max_tokens: int = 20, **params: object) -> Request:
    given = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=hash(name) & 0xFFFF)
    return Request(name, (1, 2, 3), replace(given, **params), arrival=time.monotonic())


async def read(stream: TokenStream, *names: str) -> dict[str, list[TokenOutput]]:
    """All outputs of the named requests, to their ends."""
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in names}
    open_names = set(names)
    while open_names:
        for output in await asyncio.wait_for(stream.next(), 20):
            assert output.request_id in open_names, "news after the end"
            outputs[output.request_id].append(output)
            if output.finish is not None:
                open_names.discard(output.request_id)
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.02)


async def test_tokens_arrive_whole_and_in_order(start: Starter) -> None:
    engine = await start()
    model = UniformExecutor(eos_token_ids=(0,))
    asked = [request(f"r{i}", 40, logprobs=0, ignore_eos=False) for i in range(8)]
    stream = engine.submit(asked)
    outputs = await read(stream, *(each.id for each in asked))
    for each in asked:
        mine = outputs[each.id]
        assert tokens(mine) == model.expected_output(each.prompt_token_ids, each.params, 4096)
        assert [entry.rank for output in mine for entry in output.logprobs] == tokens(mine)
        waits = [output.queue_seconds for output in mine if output.queue_seconds is not None]
        assert len(waits) == 1
        assert 0.0 <= waits[0] < 10.0
    await until(lambda: engine.stats().pages_used == 0 and engine.stats().running == 0)
    assert engine.stats().generation_tokens == sum(len(tokens(each)) for each in outputs.values())


async def test_stop_ids_and_prompt_logprobs(start: Starter) -> None:
    engine = await start()
    model = UniformExecutor()
    seed = next(s for s in range(1000) if model.expected_output((1, 2, 3), SamplingParams(seed=s), 99)[-1] == 0)
    first = model.expected_output((1, 2, 3), SamplingParams(seed=seed), 99)[0]
    asked = [
        Request("eos", (1, 2, 3), SamplingParams(seed=seed)),
        Request("stop", (1, 2, 3), SamplingParams(seed=seed, stop_token_ids=(first,))),
        Request("score", (1, 2, 3), SamplingParams(seed=seed, max_tokens=0, prompt_logprobs=0)),
    ]
    outputs = await read(engine.submit(asked), "eos", "stop", "score")
    assert (outputs["eos"][-1].finish, outputs["eos"][-1].stop_token) == (FinishReason.STOP, None)
    assert tokens(outputs["stop"]) == [first]
    assert (outputs["stop"][-1].finish, outputs["stop"][-1].stop_token) == (FinishReason.STOP, first)
    assert outputs["score"][-1].finish is FinishReason.LENGTH
    assert [entry.rank for output in outputs["score"] for entry in output.prompt_logprobs] == [2, 3]


async def test_crash_ends_every_stream_within_two_seconds(start: Starter) -> None:
    engine = await start("slow")
    streams = [engine.submit([request(f"r{i}", 4000)]) for i in range(6)]
    await asyncio.gather(*(stream.next() for stream in streams))
    os.kill(engine.ready.pid, signal.SIGKILL)
    began = time.monotonic()

    async def to_the_end(stream: TokenStream) -> None:
        while True:
            await stream.next()

    ends = await asyncio.gather(*(to_the_end(stream) for stream in streams), return_exceptions=True)
    assert time.monotonic() - began < 2.0
    assert all(isinstance(end, EngineDeadError) and "SIGKILL" in end.message for end in ends)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        engine.submit([request("late")])


async def test_a_dead_engine_is_not_said_to_hang(
    start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front, "SILENCE_SECONDS", 1.0)
    engine = await start()
    os.kill(engine.ready.pid, signal.SIGKILL)
    death = await engine.died()
    await asyncio.sleep(2.0)
    assert "SIGKILL" in death.message
    assert "hangs" not in caplog.text
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        engine.check_health()


async def test_stopped_engine_is_found_and_may_recover(start: Starter) -> None:
    engine = await start("slow", hang_seconds=1.0)
    stream = engine.submit([request("hung", 4000)])
    await stream.next()
    os.kill(engine.ready.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="hangs"):
        await asyncio.wait_for(read(stream, "hung"), 5)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    os.kill(engine.ready.pid, signal.SIGCONT)
    await until(lambda: engine.stats().running == 0 and engine.stats().pages_used == 0)
    engine.check_health()
    outputs = await read(engine.submit([request("next", 5)]), "next")
    assert len(tokens(outputs["next"])) == 5


async def test_the_age_of_a_step_that_does_not_end_is_known(start: Starter) -> None:
    engine = await start("slow")
    stream = engine.submit([request("waiting", 4000)])
    await stream.next()
    os.kill(engine.ready.pid, signal.SIGSTOP)
    await until(lambda: engine.stats().step_age > 1.0)
    engine.check_health()
    os.kill(engine.ready.pid, signal.SIGCONT)
    await until(lambda: engine.stats().step_age < 1.0)
    engine.abort(["waiting"])
    await until(lambda: engine.stats().running == 0 and engine.stats().step_age == 0.0)


async def test_slow_consumer_stalls_nobody(start: Starter) -> None:
    engine = await start()
    slow = engine.submit([request("slow", 500)])
    for i in range(5):
        await read(engine.submit([request(f"fast{i}", 50)]), f"fast{i}")
    await until(lambda: engine.stats().running == 0)
    news = await slow.next()
    assert len(news) == 1, "what waits is merged into one output"
    assert len(news[0].tokens) == 500
    assert news[0].finish is FinishReason.LENGTH


async def test_abort_frees_pages_and_ends_the_stream(start: Starter) -> None:
    engine = await start("slow")
    stream = engine.submit([request("a", 4000), request("b", 4000)])
    await stream.next()
    assert engine.stats().pages_used > 0
    engine.abort(["a", "b", "unknown"])
    outputs = await read(stream, "a", "b")
    assert outputs["a"][-1].finish is outputs["b"][-1].finish is FinishReason.ABORT
    await until(lambda: engine.stats().pages_used == 0 and engine.stats().running == 0, seconds=2.0)
    engine.abort(["a"])


async def test_drain_completes_what_runs_and_refuses_what_comes(start: Starter) -> None:
    engine = await start("slow")
    stream = engine.submit([request("r", 20)])
    draining = asyncio.create_task(engine.drain(10.0))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        engine.submit([request("late")])
    outputs = await read(stream, "r")
    assert len(tokens(outputs["r"])) == 20
    assert await draining is True


async def test_drain_aborts_at_its_deadline(start: Starter) -> None:
    engine = await start("slow")
    stream = engine.submit([request("r", 4000)])
    await stream.next()
    assert await engine.drain(0.1) is False
    assert (await read(stream, "r"))["r"][-1].finish is FinishReason.ABORT


async def test_queue_limit_is_seen_at_submit(start: Starter) -> None:
    engine = await start("slow", replace(CONFIG, max_queued=3))
    with pytest.raises(CapacityError):
        engine.submit([request(f"x{i}") for i in range(4)])
    stream = engine.submit([request("a"), request("b"), request("c")])
    with pytest.raises(CapacityError) as full:
        engine.submit([request("d")])
    assert full.value.retry_after >= 1.0
    await read(stream, "a", "b", "c")
    await read(engine.submit([request("d", 2)]), "d")


async def test_impossible_requests_are_refused_at_submit(start: Starter) -> None:
    engine = await start()
    bad = [
        replace(request("long"), prompt_token_ids=(1,) * 4096),
        replace(request("empty"), prompt_token_ids=()),
        replace(request("unknown"), prompt_token_ids=(64,)),
    ]
    for each in bad:
        with pytest.raises(RequestError):
            engine.submit([request("good"), each])
    stream = engine.submit([request("good", 3)])
    with pytest.raises(RequestError, match="running already"):
        engine.submit([request("good")])
    assert len(tokens((await read(stream, "good"))["good"])) == 3


async def test_a_failed_step_ends_its_sequences_and_the_engine_goes_on(start: Starter) -> None:
    engine = await start("stumbles-at-5")
    outputs = await read(engine.submit([request("r", 100)]), "r")
    assert outputs["r"][-1].finish is FinishReason.ERROR
    assert "one step went wrong" in (outputs["r"][-1].error or "")
    again = await read(engine.submit([request("again", 10)]), "again")
    assert len(tokens(again["again"])) == 10
    engine.check_health()


async def test_a_broken_executor_ends_the_process(start: Starter) -> None:
    engine = await start("fails-at-5")
    stream = engine.submit([request("r", 100)])
    outputs = await read(stream, "r")
    assert outputs["r"][-1].finish is FinishReason.ERROR
    await until(lambda: not process_exists(engine.ready.pid), seconds=4.0)
    with pytest.raises(EngineDeadError, match="exit status 1"):
        await engine_dead(engine)


async def engine_dead(engine: AsyncEngine) -> None:
    for _ in range(100):
        engine.check_health()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(("mode", "error"), [("no-model", ModelError), ("bug", EngineError)])
async def test_a_failed_start_says_why(mode: str, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        await AsyncEngine.start(CONFIG, command=command(mode), log_level="critical")
    assert type(raised.value) is error


async def test_a_command_that_dies_at_once_is_an_error() -> None:
    with pytest.raises(EngineDeadError, match="exit status"):
        await AsyncEngine.start(CONFIG, command=[sys.executable, "-c", "raise SystemExit(7)"])


async def test_the_engine_ends_when_its_parent_dies() -> None:
    script = (
        "import asyncio, sys\n"
        "from stoker_runtime.config import EngineConfig\n"
        "from stoker_runtime.engine.engine import AsyncEngine\n"
        "async def main():\n"
        f"    engine = await AsyncEngine.start(EngineConfig(model='x'), command={command('slow')!r})\n"
        "    print(engine.ready.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert parent.stdout is not None
    engine_pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    parent.kill()
    await parent.wait()
    await until(lambda: not is_running(engine_pid), seconds=5.0)


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_two_api_processes_share_an_engine(start: Starter) -> None:
    owner = await start("slow")
    guest = await AsyncEngine.attach(owner.endpoints[0])
    mine, theirs = owner.submit([request("same", 30)]), guest.submit([request("same", 12)])
    ours = await asyncio.gather(read(mine, "same"), read(theirs, "same"))
    assert [len(tokens(each["same"])) for each in ours] == [30, 12]
    abandoned = guest.submit([request("abandoned", 4000)])
    await abandoned.next()
    await guest.close()
    await until(lambda: owner.stats().running == 0 and owner.stats().pages_used == 0)
    owner.check_health()


async def test_an_idle_engine_sends_heartbeats_and_sleeps(start: Starter) -> None:
    engine = await start()
    await read(engine.submit([request("r", 3)]), "r")
    await asyncio.sleep(0.3)
    before, first = processor_seconds(engine.ready.pid), engine.stats()
    await asyncio.sleep(1.2)
    assert engine.stats() is not first, "no heartbeat"
    after = processor_seconds(engine.ready.pid)
    assert before is not None
    assert after is not None
    assert after - before < 0.2, "an idle engine spins"


async def test_an_engine_that_is_slow_to_end_is_not_said_to_hang(
    start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(front, "STOP_GRACE_SECONDS", 3.0)
    engine = await start()
    os.kill(engine.ready.pid, signal.SIGSTOP)
    await engine.close()
    assert not process_exists(engine.ready.pid)
    assert "hangs" not in caplog.text
