"""Several API processes in front of one engine: this process starts and watches them, and answers nobody itself.

    1. the port opens; all API processes accept from it, and share connections evenly (`even.py`)
    2. the engine process starts, the API processes load their tokenizers beside it, then attach to it
    3. an API process that dies is replaced; whoever connects meanwhile goes to the others
    4. SIGTERM goes to all; each answers until the whole server is empty; then the engine stops

Invariants: no API process outlives this one, for it ends when the pipe on its standard input closes; its configuration,
which holds secrets, comes through that pipe and stands on no command line. Processes that keep ending end the server.
Knows nothing of requests; what one API process does stands in server.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Protocol

from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.engine.process import describe_status
from stoker_runtime.errors import ConfigError, EngineError
from stoker_runtime.process.board import Board
from stoker_runtime.process.exit_status import FORCED_EXIT
from stoker_runtime.serve.owned_engine import Mortal
from stoker_runtime.serve.port import address, open_port
from stoker_runtime.serve.server import outlast
from stoker_runtime.serve.tls import tls_context
from stoker_runtime.tracing import require_tracing

COMMAND = (sys.executable, "-m", "stoker_runtime.serve.api_process")
MOST_DEATHS, DEATH_SECONDS = 5, 60.0
"""So many deaths in so many seconds mean that a new process would die as well."""
FAREWELL_SECONDS = 10.0
"""For what follows the drain: cutting off the rest, and ending."""

log = logging.getLogger(__name__)


class SharedEngine(Mortal, Protocol):
    """An engine that this process started and others attach to."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where they attach: one address an engine."""
        ...

    async def close(self) -> None:
        """Stop the engine process. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an API process is told first, through its standard input; the engines' endpoints follow, or None: no engine.

    `folder` is for what all of them share and nobody else may read; it ends with this process, or else with them.
    """

    config: ServerConfig
    row: int
    rows: int
    listener: int
    board: int
    folder: str

    @property
    def name(self) -> str:
        """What the log calls the process."""
        return f"api {self.row + 1}"


class Fleet:
    """The API processes of one server. `run` returns its exit status."""

    def __init__(
        self,
        config: ServerConfig,
        start_engine: Callable[[EngineConfig], Awaitable[SharedEngine]],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`command` is an API process's program."""
        self._config = config
        self._start_engine = start_engine
        self._command = command
        self._count = config.api_server_count
        self._file, self._board = Board.create(self._count)
        self._folder = TemporaryDirectory(prefix="stoker-", ignore_cleanup_errors=True)
        self._processes: dict[int, Process] = {}
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal (0), or until the engine is dead (1).

        Raises ConfigError, ModelError or EngineError when the start fails.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        tls_context(self._config)
        require_tracing(self._config.otlp_traces_endpoint)
        listener = open_port(self._config.host, self._config.port)
        log.info("listening on %s, %d API processes", address(self._config, listener), self._count)
        engine: SharedEngine | None = None
        stopping = asyncio.create_task(self._stop.wait())
        try:
            starting = asyncio.ensure_future(self._start_engine(self._config.engine))
            for row in range(self._count):
                await self._spawn(row, listener)
            engine = await self._unless_stopped(starting, stopping)
            if engine is not None:
                await self._watch(engine, listener, stopping)
            return 0 if self._stop.is_set() else 1
        finally:
            stopping.cancel()
            await self._end_all()
            if engine is not None:
                await engine.close()
            listener.close()
            os.close(self._file)
            self._folder.cleanup()

    def stop(self) -> None:
        """Drain and stop; called a second time, exit at once."""
        if self._stop.is_set():
            log.warning("second signal: exiting at once")
            # The other processes see their pipes close and end by themselves.
            os._exit(FORCED_EXIT)
        self._stop.set()

    async def _unless_stopped(
        self, starting: asyncio.Future[SharedEngine], stopping: asyncio.Task[bool]
    ) -> SharedEngine | None:
        """The started engine; None when a signal came first. Raises EngineError when an API process cannot start."""
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        try:
            waited: list[asyncio.Future[Any]] = [starting, stopping, *ends]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return await starting
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if not stopping.done():
                self._give_up()
            return None
        finally:
            for end in ends:
                end.cancel()

    async def _watch(
        self, engine: SharedEngine, listener: socket.socket, stopping: asyncio.Task[bool]
    ) -> None:
        """Let the API processes attach, and replace those that die, until a signal or the engine's death."""
        for process in self._processes.values():
            tell(process, engine.endpoints)
        losing = asyncio.ensure_future(outlast(engine))
        try:
            while not stopping.done() and not losing.done():
                ends = {asyncio.ensure_future(process.wait()): row for row, process in self._processes.items()}
                waited: list[asyncio.Future[Any]] = [stopping, losing, *ends]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for end, row in ends.items():
                    if not end.done():
                        end.cancel()
                    elif not stopping.done() and not losing.done():
                        await self._replace(row, listener, engine)
            if losing.done():
                losing.result()
        finally:
            losing.cancel()

    async def _replace(self, row: int, listener: socket.socket, engine: SharedEngine) -> None:
        now = monotonic()
        often = len(self._deaths) == MOST_DEATHS and now - self._deaths[0] < DEATH_SECONDS
        if not self._board.all_warm or often:
            self._give_up()
        self._deaths.append(now)
        self._board.bury(row)
        ended = describe_status(self._processes[row].returncode or 0)
        log.error("API process %d ended with %s; its requests are lost, another one starts", row + 1, ended)
        await self._spawn(row, listener)
        tell(self._processes[row], engine.endpoints)

    def _give_up(self) -> None:
        """Raise for the processes that ended."""
        ended = {row: process.returncode for row, process in self._processes.items() if process.returncode is not None}
        row, status = next(iter(ended.items()))
        message = f"API process {row + 1} ended with {describe_status(status)}; see its own log above."
        raise ConfigError(message) if status == 2 else EngineError(message)

    async def _spawn(self, row: int, listener: socket.socket) -> None:
        descriptors = (listener.fileno(), self._file)
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, pass_fds=descriptors)
        tell(process, Assignment(self._config, row, self._count, *descriptors, self._folder.name))
        self._processes[row] = process

    async def _end_all(self) -> None:
        """Pass the signal on and wait; kill what stays beyond the time that draining may take."""
        running = [process for process in self._processes.values() if process.returncode is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
            tell(process, None)  # one that waits for the engine waits no longer
        patience = self._config.drain_seconds if self._stop.is_set() else 0.0
        ends = [asyncio.ensure_future(process.wait()) for process in running]
        if ends:
            await asyncio.wait(ends, timeout=patience + FAREWELL_SECONDS)
        for process in running:
            if process.returncode is None:
                log.error("process %d does not end; it is killed", process.pid)
                process.kill()
        await asyncio.gather(*ends)
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()


def tell(process: Process, message: object) -> None:
    """Send an object through a process's standard input."""
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.write(pickle.dumps(message))
