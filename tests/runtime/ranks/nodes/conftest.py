"""Groups of nodes on the loopback, whose ranks have no model: what is real is all that is between them."""

from __future__ import annotations

import os
import pickle
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.runtime.ranks.conftest import free_port
from tests.runtime.ranks.nodes.light_follower import FOLDER
from tests.runtime.ranks.nodes.light_node import COMMAND
from tests.runtime.ranks.test_faults import PATIENCE, children, wait_for

from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.nodes import SECRET_VARIABLE
from stoker_runtime.ranks.crew import Crew

PROGRAM = Path(__file__).parent / "light_node.py"


class NodeProcess:
    """A node in a process of its own."""

    def __init__(self, config: EngineConfig, secret: str | None = None, drain_seconds: float = PATIENCE) -> None:
        environment = os.environ | ({SECRET_VARIABLE: secret} if secret else {})
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=pipe, stderr=pipe, env=environment, text=False
        )
        self.pid = self._popen.pid
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._popen.stdin is not None
        self._popen.stdin.write(pickle.dumps(ServerConfig(config, port=0, drain_seconds=drain_seconds)))
        self._popen.stdin.flush()

    def _read(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self._log.append(line.decode())

    @property
    def log(self) -> str:
        if self._popen.poll() is not None:
            self._reader.join(10)
        return "".join(self._log)

    @property
    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return children(self.pid)

    def ask(self, path: str) -> httpx.Response:
        """An answer to a probe, once its port is open."""
        wait_for(lambda: "listening on" in self.log, "the node opens no port")
        found = re.search(r"listening on (http://[^,]+),", self.log)
        assert found is not None
        return httpx.get(f"{found[1]}{path}", timeout=PATIENCE)

    def status(self) -> int:
        """How it ended, which it does."""
        try:
            return self._popen.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log) from None

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._reader.join(10)
        for stream in (self._popen.stdin, self._popen.stderr):
            assert stream is not None
            stream.close()


class Group:
    """The leader's crew, in this process, and other nodes."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.crew: Crew | None = None
        self.nodes: list[NodeProcess] = []

    def lead(self) -> Crew:
        """The crew, which lets nodes join."""
        self.crew = Crew(self.config, command=COMMAND)
        self.crew.watch()
        return self.crew

    def node(self, number: int, **differs: object) -> NodeProcess:
        """Start a node. `differs` is of NodeProcess or of the configuration."""
        own = {name: differs.pop(name) for name in ("secret", "drain_seconds") if name in differs}
        config = replace(self.config, node_rank=number, **differs)  # type: ignore[arg-type]
        self.nodes.append(NodeProcess(config, **own))  # type: ignore[arg-type]
        return self.nodes[-1]

    def complete(self) -> Crew:
        """All nodes of it, ready."""
        crew = self.lead()
        nodes = [self.node(number) for number in range(1, self.config.nnodes)]
        crew.gather()
        crew.ready(on_gpu=False)
        wait_for(lambda: all(node.ask("/ready").status_code == 200 for node in nodes), "a node is not ready")
        return crew

    def close(self) -> None:
        if self.crew is not None:
            self.crew.close()
        for node in self.nodes:
            node.close()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    """`group(nnodes=3, …)`, of which all know a secret."""
    made: list[Group] = []
    monkeypatch.setenv(SECRET_VARIABLE, secrets.token_hex(16))
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def make(**options: object) -> Group:
        sizes = {"nnodes": 2, "pipeline_parallel_size": 2, **options}
        config = EngineConfig("shape:tiny", device="cpu", master_addr="127.0.0.1", master_port=free_port(), **sizes)  # type: ignore[arg-type]
        made.append(Group(config.validate()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait_gone(pids: list[int]) -> None:
    """Wait until processes are gone; zombies of a parent that does not wait count as gone."""

    def states() -> list[str]:
        found = []
        for pid in pids:
            try:
                found.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
            except OSError:
                continue
        return found

    deadline = time.monotonic() + PATIENCE
    while any(state != "Z" for state in states()):
        assert time.monotonic() < deadline, f"left: {states()}"
        time.sleep(0.05)
