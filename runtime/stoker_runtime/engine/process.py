"""The engine process as its parent holds it: started with its configuration on a pipe, watched, stopped.

Invariants: the configuration never stands on a command line. The pipe stays open while the parent lives; when the
parent dies, however it does, the engine ends by itself. The socket's folder is private and goes with the process. One
whose ranks are on several machines is killed once it has been stopped for a while: there nobody else sees it.
Knows nothing of messages beyond `Start`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.messages import Start
from stoker_runtime.process.stat import is_stopped
from stoker_runtime.ranks.watch import STOPPED_SECONDS, WATCH_SECONDS

COMMAND = (sys.executable, "-m", "stoker_runtime.engine")
# Kept small for the host's memory's sake: the loader's threads would have a heap each, and numpy's BLAS, which serves
# no request, buffers for as many threads as there are cores. Threads that compute sleep while they have nothing to do:
# those that spin take the processor from whoever the others wait for.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

log = logging.getLogger(__name__)


class EngineProcess:
    """A running engine process. Made by `spawn`."""

    def __init__(self, process: Process, folder: str, endpoint: str) -> None:
        self._process = process
        self._folder = folder
        self.endpoint = endpoint
        """Where it listens, for ZeroMQ."""
        self._guard: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(
        cls,
        config: EngineConfig,
        *,
        log_level: str = "info",
        log_json: bool = False,
        command: Sequence[str] = COMMAND,
    ) -> EngineProcess:
        """Start the process and hand it its configuration. `command` runs `__main__.main`."""
        folder = tempfile.mkdtemp(prefix="stoker-")
        endpoint = f"ipc://{folder}/engine"
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, env=ENVIRONMENT | os.environ)
        assert process.stdin is not None, "the process was started with a pipe"
        process.stdin.write(pickle.dumps(Start(config, endpoint, log_level, log_json)))
        started = cls(process, folder, endpoint)
        if config.nnodes > 1:
            started._guard = asyncio.create_task(started._end_stopped())
        return started

    async def _end_stopped(self) -> None:
        """Kill the process once a signal has held it for STOPPED_SECONDS."""
        stopped = 0
        while stopped * WATCH_SECONDS <= STOPPED_SECONDS:
            await asyncio.sleep(WATCH_SECONDS)
            stopped = stopped + 1 if is_stopped(self._process.pid) else 0
        log.critical("rank 0 has been stopped for %.0f s; all ranks end", STOPPED_SECONDS)
        self._process.kill()

    async def ended(self) -> str:
        """Wait for the end of the process; how it ended, in words."""
        return describe_status(await self._process.wait())

    async def close(self, grace: float) -> None:
        """Wait `grace` seconds for the process to exit, then kill it; remove the socket's folder. Idempotent."""
        if self._guard is not None:
            self._guard.cancel()
        if self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), grace)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def describe_status(status: int) -> str:
    """An exit status in words: "exit status 1", "signal SIGKILL"."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
