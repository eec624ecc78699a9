"""The processes of the ranks beside the leader's: started, told of steps, watched, ended together.

Invariants: no rank outlives another. When one has died or hangs, all are killed, and then the leader's process ends or
its next step raises, as it was asked to. Nothing of them stands under a name in shared memory.
Knows nothing of models and batches.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import EngineDeadError
from stoker_runtime.parallel.place import Place, places
from stoker_runtime.process.log import JsonFormatter
from stoker_runtime.process.stat import is_stopped, processor_seconds
from stoker_runtime.ranks.ring import Ring
from stoker_runtime.ranks.watch import Life, Watch

COMMAND = (sys.executable, "-m", "stoker_runtime.ranks.follower")
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
WATCH_SECONDS = 0.25
STOP_SECONDS = 5.0
LAST_WORDS_SECONDS = 1.0
"""How long the leader may still say what has failed, once the other ranks are killed."""
START_WORDS_SECONDS = 10.0
"""The same in a start: what one rank stumbles over, the leader does too, and says it better."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank is told on its standard input, pickled, before anything else. `ring` is the file of its memory."""

    config: EngineConfig
    place: Place
    store: Path
    ring: str
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


class Crew:
    """The ranks beside the leader, as the leader holds them."""

    def __init__(
        self, config: EngineConfig, *, command: Sequence[str] = COMMAND, on_fault: Callable[[str], None] | None = None
    ) -> None:
        """Start the processes. `on_fault` is called, in a thread, when a rank has died or hangs and all are killed."""
        self.config = config
        self.calls = 0
        """Odd within a call of the leader's that other ranks can keep waiting."""
        self.fault = ""
        self._on_fault = on_fault
        self._folder = Path(tempfile.mkdtemp(prefix="stoker-ranks-"))
        self.store = self._folder / "store"
        self.places = places(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            whole_experts=config.enable_expert_parallel,
        )
        self._ring = Ring.create(len(self.places) - 1)
        self._is_ready = False
        self._ended = threading.Event()
        self._found = threading.Event()
        self._processes = self._spawn(command, len(self.places) - 1)
        for place, process in zip(self.places[1:], self._processes, strict=True):
            self._tell(place, process)

    def _spawn(self, command: Sequence[str], count: int) -> Sequence[RankProcess]:
        shared, environment = (self._ring.descriptor,), ENVIRONMENT | os.environ
        return [
            subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=shared, env=environment) for _ in range(count)
        ]

    def _memory(self) -> str:
        """The ring, as a process that inherited it names it."""
        return f"/proc/self/fd/{self._ring.descriptor}"

    def _tell(self, place: Place, process: RankProcess) -> None:
        root = logging.getLogger()
        as_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
        level = logging.getLevelName(root.getEffectiveLevel()).lower()
        start = RankStart(self.config, place, self.store, self._memory(), level, as_json)
        assert process.stdin is not None, "the process was started with a pipe"
        process.stdin.write(pickle.dumps(start))
        process.stdin.flush()

    @property
    def pids(self) -> list[int]:
        """The other ranks' processes, in their order."""
        return [process.pid for process in self._processes]

    def watch(self) -> None:
        """Begin to watch. Until `ready` only a death counts."""
        threading.Thread(target=self._watch, name="stoker-ranks", daemon=True).start()

    def ready(self, *, on_gpu: bool) -> None:
        """All ranks have met and built what they need: from now on silence counts."""
        self._limits = Watch(WATCH_SECONDS, on_gpu=on_gpu)
        self._is_ready = True
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, message: bytes) -> None:
        """Tell every rank. Raises EngineDeadError when they are gone."""
        self._ring.write(message, self.check)

    def check(self) -> None:
        """Raises EngineDeadError when a rank has died or hangs."""
        if self.fault:
            raise EngineDeadError(f"The ranks ended: {self.fault}.")

    def explain(self, error: Exception) -> EngineDeadError:
        """The error of a step that failed as `error`, which may be for the fault of a rank that is being found out."""
        self._found.wait(LAST_WORDS_SECONDS)
        reason = self.fault or f"{type(error).__name__}: {error}"
        return EngineDeadError(f"The ranks ended: {reason}.")

    def close(self) -> None:
        """Wait a moment for the ranks to end, which they were told, then kill them. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        deadline = time.monotonic() + (STOP_SECONDS if self._is_ready and not self.fault else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._ring.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes, start=1)}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        reason = None
        while reason is None:
            dead = poll.poll(WATCH_SECONDS * 1000)
            if self._ended.is_set():
                break
            if dead:
                rank = ranks[dead[0][0]]
                reason = f"rank {rank} ended with {describe(self._processes[rank - 1].wait())}"
            elif self._is_ready:
                reason = self._limits.tick(time.monotonic(), self._lives(), self.calls)
        for descriptor in ranks:
            os.close(descriptor)
        if reason is not None:
            self._end(reason)

    def _lives(self) -> list[Life]:
        pids = [os.getpid(), *self.pids]
        return [Life(is_stopped(pid), processor_seconds(pid) or 0.0) for pid in pids]

    def _end(self, reason: str) -> None:
        self.fault = reason
        self._found.set()
        log.critical("%s; all ranks end", reason)
        for process in self._processes:
            process.kill()
            process.wait()
        if self._on_fault is not None:
            self._ended.wait(LAST_WORDS_SECONDS if self._is_ready else START_WORDS_SECONDS)
            self._on_fault(reason)


def describe(status: int) -> str:
    """An exit status in words."""
    return f"exit status {status}" if status >= 0 else f"signal {-status}"
