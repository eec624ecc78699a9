"""Ranks that tests share: their processes are started once. On several nodes, too: then other nodes are threads."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from stoker_runtime import LLM
from stoker_runtime.config import EngineConfig
from stoker_runtime.nodes import SECRET_VARIABLE
from stoker_runtime.ranks.build import lead
from stoker_runtime.ranks.crew import Crew
from stoker_runtime.ranks.nodes.member import Member
from stoker_runtime.ranks.team import RankProcess, Team

FOLLOWER = Path(__file__).parent / "shared_follower.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Lent:
    """A shared process, as a team holds it: it has ended when it has done what it was told."""

    def __init__(self, process: subprocess.Popen[bytes], give_back: Callable[[], None]) -> None:
        self._process = process
        self._give_back = give_back
        self.pid = process.pid
        self.stdin: IO[bytes] | None = Unclosed(process.stdin)  # type: ignore[assignment]

    def wait(self, timeout: float | None = None) -> int:
        """Its model is closed; a process that has died instead has said why."""
        assert self._process.stdout is not None
        if timeout is not None and not select.select([self._process.stdout], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self._process.args, timeout)
        if self._process.stdout.readline() != b"done\n":
            return self._process.wait()
        self._give_back()
        return 0

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
    free: list[subprocess.Popen[bytes]] = []

    def prepare(count: int) -> None:
        # By this thread: a process ends with the one that started it.
        while len(free) < count:
            command = [sys.executable, str(FOLLOWER)]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, env=ENVIRONMENT))
            free.append(processes[-1])
        for process in free:
            if not hasattr(process, "greeted"):
                assert process.stdout is not None
                assert process.stdout.readline() == b"here\n"
                process.greeted = True  # type: ignore[attr-defined]

    def lend(count: int) -> Sequence[RankProcess]:
        taken = [free.pop() for _ in range(count)]
        return [Lent(process, lambda process=process: free.append(process)) for process in taken]  # type: ignore[misc]

    def start(model: str, **options: Any) -> LLM:
        given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_size": 16, "cpu_threads": 1, **options}
        config = EngineConfig(model=model, **given)
        SharedTeam.lent = staticmethod(lend)
        prepare(config.ranks - 1)
        if config.nnodes > 1:
            config = replace(config, master_addr=config.master_addr or "127.0.0.1", master_port=free_port())
            for number in range(1, config.nnodes):
                member = Member(replace(config, node_rank=number), team=SharedTeam)
                threading.Thread(target=member.run, daemon=True).start()
        return LLM.over(lead(Crew(config.validate(), team=SharedTeam)), config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, secrets.token_hex(16))
        yield start
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def free_port() -> int:
    """A port of the loopback that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
