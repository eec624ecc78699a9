"""The engine's front in an API process: submit requests, read their tokens, know how the engine fares.

Invariants: no task per request or token; one message in per step, one wake-up per stream and step. Every stream
ends: with its last output, or with an error within two seconds of the engine's death, or within `hang_seconds` of
its last real step. Imports no torch.
Knows nothing of text or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType

import zmq
import zmq.asyncio

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.ledger import HandOver, Ledger
from stoker_runtime.engine.messages import (
    Abort,
    Adapters,
    Add,
    Done,
    Failed,
    Hello,
    Load,
    Message,
    Ready,
    Refused,
    Sleep,
    Step,
    Stop,
    Unload,
    Wake,
    decode,
    encode,
)
from stoker_runtime.engine.placing import Load as EngineLoad
from stoker_runtime.engine.process import COMMAND, EngineProcess
from stoker_runtime.engine.stream import TokenStream
from stoker_runtime.engine.watchdog import Watchdog
from stoker_runtime.errors import AsleepError, EngineDeadError, EngineError, StokerError, UnavailableError
from stoker_runtime.process.stat import process_exists, processor_seconds
from stoker_runtime.request import Adapter, EngineStats, Request
from stoker_runtime.scheduler.limits import refuse_impossible

WATCH_SECONDS = 0.25
SILENCE_SECONDS = 5.0
"""An idle engine sends two heartbeats a second; this long without one, it is not well."""
STOP_GRACE_SECONDS = 5.0
LAST_WORDS_SECONDS = 0.1

log = logging.getLogger(__name__)


class AsyncEngine:
    """One engine process as one API process sees it. Use from one event loop."""

    def __init__(self, *, hang_seconds: float = 30.0) -> None:
        """`hang_seconds`: work pending and no new step for so long means hung, as `Watchdog` says precisely."""
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0)):
            self._socket.setsockopt(option, value)
        self._watchdog = Watchdog(WATCH_SECONDS, SILENCE_SECONDS, hang_seconds)
        self._process: EngineProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._ledger = Ledger()
        self._hand_over = HandOver(self._ledger, self._socket.send, self._abort)
        self.adapters: dict[str, Adapter] = {}
        """Those that are served, by name."""
        self._tickets: dict[int, asyncio.Future[None]] = {}
        self._last_ticket = 0
        self._processor_seconds = 0.0
        self._draining = False
        self._closed = False
        self._dead: EngineDeadError | None = None
        self._hung: EngineDeadError | None = None
        self._death = asyncio.Event()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        log_level: str = "info",
        log_json: bool = False,
        hang_seconds: float = 30.0,
        command: Sequence[str] = COMMAND,
        process: EngineProcess | None = None,
    ) -> AsyncEngine:
        """Start an engine process and wait until its model is loaded.

        Raises what made the start fail: ConfigError, ModelError, KernelUnavailableError, or EngineError.
        `command` is the engine process's program, for one that builds another executor. `process` is one that was
        spawned with `config` already: the engine takes it over.
        """
        engine = cls(hang_seconds=hang_seconds)
        try:
            engine._process = process or await EngineProcess.spawn(
                config, log_level=log_level, log_json=log_json, command=command
            )
            await engine._connect(engine._process.endpoint)
        except BaseException:
            await engine.close()
            raise
        return engine

    @classmethod
    async def attach(cls, endpoint: str, *, hang_seconds: float = 30.0) -> AsyncEngine:
        """Share the engine process that listens at `endpoint`; another API process started it and will stop it."""
        engine = cls(hang_seconds=hang_seconds)
        try:
            await engine._connect(endpoint)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def ready(self) -> Ready:
        """The sizes that the engine decided on, and what it says of itself."""
        return self._ready.result()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where further API processes can attach: one address; none when this one attached itself."""
        return (self._process.endpoint,) if self._process is not None else ()

    @property
    def engines(self) -> tuple[AsyncEngine, ...]:
        """Each engine by itself: this one."""
        return (self,)

    @property
    def load(self) -> EngineLoad:
        """What it has to do, by the newest heartbeat and what was sent since."""
        return self._ledger.load

    @property
    def max_model_len(self) -> int:
        """The most tokens of one sequence, prompt and output together."""
        return self.ready.max_model_len

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows: `0 … vocab_size - 1`."""
        return self.ready.vocab_size

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Queue `requests`, all or none, and return the stream of their outputs.

        Raises RequestError for one that cannot run, CapacityError when the queue is full, UnavailableError when
        draining, EngineDeadError when there is no engine any more. A refusal that only the engine can know (other
        API processes share its queue) comes from the stream; so does one of requests so large that they are looked
        at in pieces.
        """
        self.check_health()
        if self._draining:
            raise UnavailableError("The server is shutting down and takes no new requests.")
        if self._ledger.stats.sleep_level:
            raise AsleepError
        self._ledger.refuse_running(requests)
        self._ledger.refuse_beyond(self.ready.max_queued, len(requests))
        return self._hand_over.submit(requests, self._encoded)

    def _encoded(self, handle: int, request: Request) -> bytes:
        """The message of a request. Raises RequestError for one that cannot run."""
        refuse_impossible(
            request,
            max_tokens=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_ids=len(self.ready.eos_token_ids),
        )
        return encode(Add(handle, request))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; ids that are unknown or finished are ignored. Their streams get ABORT."""
        self._abort(self._ledger.abort(request_ids))

    def _abort(self, handles: Sequence[int]) -> None:
        if handles:
            self._send(Abort(tuple(handles)))

    async def load_adapter(self, name: str, path: str, *, parent: str = "", replace: bool = False) -> None:
        """Serve the PEFT folder `path` as `name`, once it was read whole.

        Raises RequestError for a name that is taken or a folder that cannot be used, UnsupportedError where no adapters
        are served; nothing has changed then.
        """
        await self._ask(lambda ticket: Load(ticket, name, path, parent, replace))

    async def unload_adapter(self, name: str) -> None:
        """Take no new requests for `name`; those that there are go on. Raises NotFoundError."""
        await self._ask(lambda ticket: Unload(ticket, name))

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        """Take no new requests, and give the device's memory back once nothing runs; with `abort` what runs ends first.

        Raises RequestError for another level than 1 and 2, or when it is woken up before, UnavailableError where the
        host has no room, NotFoundError where it was not started to sleep.
        """
        await self._ask(lambda ticket: Sleep(ticket, level, abort))

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Take the memory of these parts again, or of all; requests are taken when all are there.

        Raises UnavailableError where the device has no room, ModelError for files that are not what they were: it
        sleeps on.
        """
        await self._ask(lambda ticket: Wake(ticket, tuple(tags)))

    async def _ask(self, make: Callable[[int], Load | Unload | Sleep | Wake]) -> None:
        self.check_health()
        self._last_ticket += 1
        ticket = self._last_ticket
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = answer
        self._send(make(ticket))
        try:
            await answer
        finally:
            del self._tickets[ticket]

    def stats(self) -> EngineStats:
        """The newest heartbeat."""
        self._ledger.stats.step_age = self._watchdog.stall
        return self._ledger.stats

    @property
    def open_requests(self) -> int:
        """Requests of this process that have not had their last output."""
        return self._ledger.open_requests

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine process is gone, or hangs as far as its heartbeats tell."""
        error = self._dead or self._hung
        if error is not None:
            raise error

    async def died(self) -> EngineDeadError:
        """Wait until the engine process is gone; what ended it. One that hangs may go on yet, and is not meant."""
        await self._death.wait()
        assert self._dead is not None, "a death without a reason"
        return self._dead

    async def drain(self, timeout: float) -> bool:
        """Take no new requests and wait for the open ones; after `timeout` seconds abort what is left.

        Returns whether all of them completed.
        """
        self._draining = True
        try:
            await asyncio.wait_for(self._ledger.idle.wait(), timeout)
        except TimeoutError:
            left = self._ledger.request_ids
            log.warning("%d requests did not finish in %.0f s; they are aborted", len(left), timeout)
            self.abort(left)
            return False
        return True

    async def close(self) -> None:
        """Stop the engine process if this one started it. Open streams end with EngineDeadError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._process is not None:
            if self._dead is None:
                self._send(Stop())
            await self._process.close(STOP_GRACE_SECONDS if self._ready.done() else 0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self._hand_over.close(), return_exceptions=True)
        self._ready.cancel()
        self._die("The engine was closed.")
        self._socket.close()
        self._context.term()

    async def _connect(self, endpoint: str) -> None:
        self._socket.connect(endpoint)
        self._send(Hello())
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        if self._process is not None:
            self._tasks.append(asyncio.create_task(self._mourn(self._process)))
        await asyncio.shield(self._ready)

    def _send(self, message: Message) -> None:
        # Without a high-water mark a send never waits: the future that comes back is done.
        self._socket.send(encode(message))

    async def _receive(self) -> None:
        try:
            while True:
                self._take(decode(await self._socket.recv()))
        except Exception as error:
            log.exception("the engine's messages cannot be read")
            self._die(f"The engine's messages cannot be read: {error}")

    def _take(self, message: Message) -> None:
        match message:
            case Step():
                self._watchdog.heard(message.stats.steps)
                self._recover()
                self._ledger.take(message)
            case Refused(handle, error):
                self._ledger.refuse(handle, error)
            case Adapters(served):
                self.adapters = {each.name: each for each in served}
            case Done(ticket, problem):
                self._answer(ticket, problem)
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message)
            case Failed(error):
                if not self._ready.done():
                    self._ready.set_exception(error)
            case _:
                raise EngineError(f"The engine sent {type(message).__name__}, which only clients send.")

    async def _watch(self) -> None:
        await asyncio.shield(self._ready)
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._death.is_set() or self._closed:
                return  # silence of a process that is dead, or ends, is no hang
            if self._process is None and not process_exists(self.ready.pid):
                self._die("The engine process is gone.")
                return
            reason = self._watchdog.tick(monotonic(), pending=self._ledger.busy, computing=self._is_computing())
            if reason is not None and self._hung is None:
                self._suspect(reason)

    def _is_computing(self) -> bool:
        # On a GPU a hung kernel may well keep the host spinning, so there only steps count.
        if self.ready.description.get("device") != "cpu":
            return False
        before, self._processor_seconds = self._processor_seconds, processor_seconds(self.ready.pid) or 0.0
        return self._processor_seconds > before

    def _suspect(self, reason: str) -> None:
        # Whoever waits gets an answer now; should the engine wake up again, it need not finish their work.
        log.error("the engine hangs: %s", reason)
        self._hung = EngineDeadError(f"The engine hangs: {reason}.")
        self._abort(self._ledger.fail_all(self._hung))

    def _recover(self) -> None:
        if self._hung is not None:
            log.warning("the engine is heard of again")
            self._hung = None

    async def _mourn(self, process: EngineProcess) -> None:
        ended = await process.ended()
        # What it said before it ended is still on its way to the receiver.
        await asyncio.sleep(LAST_WORDS_SECONDS)
        if not self._closed:
            log.error("the engine process ended with %s", ended)
        self._die(f"The engine process ended with {ended}.")

    def _die(self, reason: str) -> None:
        if self._dead is None:
            self._dead = EngineDeadError(reason)
        self._death.set()
        if not self._ready.done():
            self._ready.set_exception(self._dead)
        self._ledger.fail_all(self._dead)
        for ticket in list(self._tickets):
            self._answer(ticket, self._dead)

    def _answer(self, ticket: int, error: StokerError | None) -> None:
        answer = self._tickets.get(ticket)
        if answer is not None and not answer.done():
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)
