"""Ranks that tests share: their processes are started once."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from stoker_runtime import LLM
from stoker_runtime.config import EngineConfig
from stoker_runtime.ranks.build import lead
from stoker_runtime.ranks.crew import Crew
from stoker_runtime.ranks.team import RankProcess, Team

FOLLOWER = Path(__file__).parent / "shared_follower.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Lent:
    """A shared process, as a team holds it: it has ended when it has done what it was told."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.stdin: IO[bytes] | None = Unclosed(process.stdin)  # type: ignore[assignment]

    def wait(self, timeout: float | None = None) -> int:
        """Its model is closed; a process that has died instead has said why."""
        assert self._process.stdout is not None
        if timeout is not None and not select.select([self._process.stdout], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self._process.args, timeout)
        return 0 if self._process.stdout.readline() == b"done\n" else self._process.wait()

    def kill(self) -> None:
        self._process.kill()


class Unclosed:
    """A pipe that a team may close without ending the process."""

    def __init__(self, stream: Any) -> None:
        self.write, self.flush = stream.write, stream.flush

    def close(self) -> None:
        """The process goes on."""


class SharedTeam(Team):
    """A team of lent processes."""

    lent: Callable[[int], Sequence[RankProcess]]

    def _spawn(self, command: Sequence[str], count: int) -> Sequence[RankProcess]:
        return self.lent(count)

    def _memory(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._ring.descriptor}"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., LLM]]:
    """An LLM over several ranks: `ranks(model, tensor_parallel_size=2, …)`."""
    processes: list[subprocess.Popen[bytes]] = []

    def lend(count: int) -> Sequence[RankProcess]:
        while len(processes) < count:
            command = [sys.executable, str(FOLLOWER)]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, env=ENVIRONMENT))
        for process in processes[:count]:
            if not hasattr(process, "greeted"):
                assert process.stdout is not None
                assert process.stdout.readline() == b"here\n"
                process.greeted = True  # type: ignore[attr-defined]
        return [Lent(process) for process in processes[:count]]

    def start(model: str, **options: Any) -> LLM:
        given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_size": 16, "cpu_threads": 1, **options}
        config = EngineConfig(model=model, **given).validate()
        SharedTeam.lent = staticmethod(lend)
        return LLM.over(lead(Crew(config, team=SharedTeam)), config)

    yield start
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
