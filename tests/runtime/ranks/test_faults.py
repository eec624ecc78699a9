"""A rank that dies, is stopped, or never answers: every stream ends with an error, every rank ends, and the server too.

Real processes. Seconds are bounds of patience on a crowded machine, not what it takes: that is what test_watch.py says.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from stoker_runtime import LLM
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.errors import ConfigError, EngineDeadError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.process.stat import process_exists
from stoker_runtime.ranks.build import build_model, lead
from stoker_runtime.ranks.crew import Crew
from stoker_runtime.request import FinishReason, Request, SamplingParams

PATIENCE = 150.0
ONE_RANK = EngineConfig("shape:tiny", device="cpu", dtype="float32", max_model_len=2048, max_num_seqs=4, cpu_threads=1)
TWO_RANKS = replace(ONE_RANK, tensor_parallel_size=2)
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)
FAULTY = Path(__file__).parent / "faulty_follower.py"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """The processes that a process has started, whichever thread did."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(each) for task in tasks for each in (task / "children").read_text().split()]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "stoker" in name}


@pytest.mark.parametrize(
    ("victim", "number", "says"),
    [
        ("rank", signal.SIGSTOP, "rank 1 has been stopped"),
        ("leader", signal.SIGSTOP, "engine process ended with signal SIGKILL"),
    ],
)
async def test_a_stopped_rank_ends_every_stream_and_all_ranks(victim: str, number: signal.Signals, says: str) -> None:
    engine = await AsyncEngine.start(TWO_RANKS, log_level="error", hang_seconds=10 * PATIENCE)
    leader = engine.ready.pid
    ranks = children(leader)
    assert len(ranks) == 1
    stream = engine.submit([Request(name, (1, 2, 3), LONG, arrival=time.monotonic()) for name in "ab"])
    await asyncio.wait_for(stream.next(), PATIENCE)
    os.kill(ranks[0] if victim == "rank" else leader, number)
    errors: list[str] = []
    while not errors:
        try:
            outputs = await asyncio.wait_for(stream.next(), PATIENCE)
            errors = [output.error for output in outputs if output.error]
        except EngineDeadError as error:
            errors = [error.message]
    assert all(says in error for error in errors), errors
    dead = await asyncio.wait_for(engine.died(), PATIENCE)
    assert "ended with" in dead.message
    with pytest.raises(EngineDeadError):
        engine.check_health()
    wait_for(lambda: not any(process_exists(pid) for pid in [leader, *ranks]), "a rank is left")
    assert shared_memory() == set()
    await engine.close()


async def test_health_tells_of_the_slowest_rank() -> None:
    """Of a rank that is held up, shorter than one that is given up; then all goes on."""
    engine = await AsyncEngine.start(TWO_RANKS, log_level="error")
    try:
        (rank,) = children(engine.ready.pid)
        stream = engine.submit([Request("held", (1, 2, 3), replace(LONG, max_tokens=500), arrival=time.monotonic())])
        await asyncio.wait_for(stream.next(), PATIENCE)
        os.kill(rank, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + PATIENCE
            while engine.stats().step_age <= 1.0:
                assert time.monotonic() < deadline, "a step that takes long does not show"
                engine.check_health()
                await asyncio.sleep(0.02)
        finally:
            os.kill(rank, signal.SIGCONT)
        ages, last = [], None
        while last is None or last.finish is None:
            for last in await asyncio.wait_for(stream.next(), PATIENCE):
                assert last.error is None
            ages.append(engine.stats().step_age)
        assert last.finish is FinishReason.LENGTH
        assert min(ages[:-1]) < 0.5
    finally:
        await engine.close()


def test_a_killed_rank_ends_the_server_with_a_status_that_makes_it_start_again(tmp_path: Path) -> None:
    from tests.runtime.ranks.server import Server

    server = Server("shape:tiny", "--device", "cpu", "--tensor-parallel-size", "2", "--cpu-threads", "1")
    try:
        url = server.wait_ready(PATIENCE)
        (leader,) = children(server.pid)
        (rank,) = children(leader)
        errors: list[str] = []

        def ask() -> None:
            body = {"model": "shape:tiny", "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
                for line in answer.iter_lines():
                    begun.set()
                    if '"error"' in line:
                        errors.append(line)

        begun = threading.Event()
        client = threading.Thread(target=ask)
        client.start()
        assert begun.wait(PATIENCE)
        os.kill(rank, signal.SIGKILL)
        client.join(PATIENCE)
        assert len(errors) == 1
        assert re.search("rank 1 ended with signal 9|engine process ended", errors[0])
        assert server.exit_status(PATIENCE) == 1
        wait_for(lambda: not process_exists(leader) and not process_exists(rank), "a rank is left")
    finally:
        server.close()


@pytest.mark.parametrize(("what", "told"), [("memory", "out of memory"), ("device", "uncorrectable ECC error")])
def test_a_rank_that_has_no_memory_or_no_device_ends_all(
    what: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Within seconds, by its own words in the log; what runs gets an error that names the rank."""
    crew = Crew(TWO_RANKS, command=[sys.executable, str(FAULTY), what])
    with LLM.over(lead(crew), TWO_RANKS) as llm:
        (rank,) = crew.pids
        begun = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank 1 ended with"):
            llm.generate_tokens([[1, 2, 3], [4]], [LONG, LONG])
        wait_for(lambda: not process_exists(rank), "a rank is left")
        assert time.monotonic() - begun < PATIENCE / 3
        with pytest.raises(EngineDeadError, match="rank 1 ended with"):
            llm.generate_tokens([[1, 2, 3]], [LONG])
    assert told in capfd.readouterr().err
    assert not torch.distributed.is_initialized()


def test_a_leader_that_fails_within_a_step_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for its part of an exchange, and would for ever."""
    crew = Crew(TWO_RANKS)
    with LLM.over(lead(crew), TWO_RANKS) as llm:
        (rank,) = crew.pids

        def execute(self: Executor, batch: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

        monkeypatch.setattr(Executor, "execute", execute)
        with pytest.raises(EngineDeadError, match=r"allocate 3\.00 GiB"):
            llm.generate_tokens([[1, 2, 3]], [LONG])
        monkeypatch.undo()
        wait_for(lambda: not process_exists(rank), "a rank is left")
        with pytest.raises(EngineDeadError, match=r"allocate 3\.00 GiB"):
            llm.generate_tokens([[4, 5]], [LONG])
    assert not torch.distributed.is_initialized()


def test_an_exchange_that_never_answers_is_an_error() -> None:
    crew = Crew(TWO_RANKS, command=[sys.executable, str(FAULTY), "silence"])
    with LLM.over(lead(crew), TWO_RANKS) as llm:
        (rank,) = crew.pids
        with pytest.raises(EngineDeadError, match="no rank has computed"):
            llm.generate_tokens([[1, 2, 3]], [LONG])
        wait_for(lambda: not process_exists(rank), "a rank is left")
        with pytest.raises(EngineDeadError, match="no rank has computed"):
            llm.generate_tokens([[1, 2, 3]], [LONG])
    # What the dead ranks left does not keep this process from starting others.
    assert not torch.distributed.is_initialized()


def test_a_server_whose_ranks_cannot_share_the_model_ends_with_the_reason() -> None:
    """While they meet."""
    from tests.runtime.ranks.server import Server

    server = Server("shape:tiny", "--device", "cpu", "--tensor-parallel-size", "3")
    try:
        assert server.exit_status(PATIENCE) == 2
    finally:
        server.close()
    assert "tensor_parallel_size is 3" in server.log
    assert "Traceback" not in server.log
    assert "terminate called" not in server.log


def test_a_start_that_fails_leaves_nothing_to_the_next() -> None:
    others = children(os.getpid())
    for tensors in (7, 3):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size is {tensors}"):
            build_model(replace(TWO_RANKS, tensor_parallel_size=tensors))
        assert not torch.distributed.is_initialized()
        assert children(os.getpid()) == others
    with LLM.over(lead(Crew(TWO_RANKS)), TWO_RANKS) as llm:
        assert len(llm.generate_tokens([[1, 2, 3]], [replace(LONG, max_tokens=4)])[0]) == 4
    assert not torch.distributed.is_initialized()
