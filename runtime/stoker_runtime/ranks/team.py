"""The ranks of one machine beside whoever started them: processes that are told of steps through shared memory.

Invariants: they end with the thread that made the team, and are killed together. Nothing of them stands under a name in
shared memory.
Knows nothing of other machines, and of why a rank should end.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Protocol

from stoker_runtime.config import EngineConfig
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import Place
from stoker_runtime.process.log import JsonFormatter
from stoker_runtime.process.stat import is_stopped, processor_seconds
from stoker_runtime.ranks.ring import Ring
from stoker_runtime.ranks.watch import Life

COMMAND = (sys.executable, "-m", "stoker_runtime.ranks.follower")
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank is told on its standard input, pickled, before anything else.

    It is reader `reader` of `readers` of the ring, of which `ring` is the file.
    """

    config: EngineConfig
    place: Place
    meeting: Meeting
    ring: str
    reader: int
    readers: int
    log_level: str
    log_json: bool


class RankProcess(Protocol):
    """What is needed of a started process: `subprocess.Popen`."""

    pid: int
    stdin: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended. Raises TimeoutExpired."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class Team:
    """The ranks at `places`, none or several."""

    def __init__(self, places: Sequence[Place], command: Sequence[str] = COMMAND) -> None:
        """Start the processes, which wait for `tell`."""
        self._places = tuple(places)
        self._ring = Ring.create(len(places))
        self._closed = False
        self._processes = self._spawn(command, len(places))

    def _spawn(self, command: Sequence[str], count: int) -> Sequence[RankProcess]:
        shared, environment = (self._ring.descriptor,), ENVIRONMENT | os.environ
        return [
            subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=shared, env=environment) for _ in range(count)
        ]

    def _memory(self) -> str:
        """The ring, as a process that inherited it names it."""
        return f"/proc/self/fd/{self._ring.descriptor}"

    def tell(self, config: EngineConfig, meeting: Meeting) -> None:
        """What to build, and where to meet. Once."""
        root = logging.getLogger()
        as_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
        level = logging.getLevelName(root.getEffectiveLevel()).lower()
        for at, (place, process) in enumerate(zip(self._places, self._processes, strict=True)):
            start = RankStart(config, place, meeting, self._memory(), at, len(self._places), level, as_json)
            assert process.stdin is not None, "the process was started with a pipe"
            process.stdin.write(pickle.dumps(start))
            process.stdin.flush()

    @property
    def pids(self) -> list[int]:
        """The processes, in their order."""
        return [process.pid for process in self._processes]

    def lives(self) -> list[Life]:
        """What the system says of each."""
        return [life_of(pid) for pid in self.pids]

    def write(self, message: bytes, stalled: Callable[[], None]) -> None:
        """Tell all of them; `stalled` is called while the slowest leaves no room, and may raise."""
        if self._processes:
            self._ring.write(message, stalled)

    @contextmanager
    def deaths(self) -> Iterator[Callable[[float], str | None]]:
        """What waits so many seconds for the death of a rank: which has ended, and how; None without one.

        One that ends with status 0 was told to, and nobody need know.
        """
        poll = select.poll()
        ranks = {os.pidfd_open(process.pid): at for at, process in enumerate(self._processes)}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)

        def next_death(seconds: float) -> str | None:
            for descriptor, _ in poll.poll(seconds * 1000):
                at = ranks[descriptor]
                if status := self._processes[at].wait():
                    return f"rank {self._places[at].rank} ended with {describe(status)}"
                poll.unregister(descriptor)
            return None

        try:
            yield next_death
        finally:
            for descriptor in ranks:
                os.close(descriptor)

    def kill(self) -> None:
        """End them at once."""
        for process in self._processes:
            process.kill()
            process.wait()

    def close(self, patience: float) -> None:
        """Wait up to `patience` seconds for them to end, which they were told, then kill them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + patience
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._ring.close()


def life_of(pid: int) -> Life:
    """What the system says of a process."""
    return Life(is_stopped(pid), processor_seconds(pid) or 0.0)


def describe(status: int) -> str:
    """An exit status in words."""
    return f"exit status {status}" if status >= 0 else f"signal {-status}"
