"""The open requests of one API process, and what is known of the engine's queue.

Invariants: a handle is used once; a request leaves the ledger exactly when its last output or error was recorded.
What the engine still says of a request that left is dropped.
Knows nothing of sockets and processes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from time import monotonic

from stoker_runtime.engine.messages import Finished, Step
from stoker_runtime.engine.placing import Load
from stoker_runtime.engine.stream import Part, TokenStream
from stoker_runtime.errors import CapacityError, RequestError, StokerError
from stoker_runtime.request import EngineStats, FinishReason, Request
from stoker_runtime.scheduler.rate import AdmissionRate


class Ledger:
    """Handles, buffers and counts."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.idle = asyncio.Event()
        self.idle.set()
        self._parts: dict[int, Part] = {}
        self._handle_of: dict[str, int] = {}
        self._handles = itertools.count()
        self._admissions = AdmissionRate()
        self._sent = 0
        self._received = 0

    @property
    def busy(self) -> bool:
        """Whether any request is open."""
        return bool(self._parts)

    @property
    def open_requests(self) -> int:
        """How many requests have not had their last output."""
        return len(self._parts)

    @property
    def request_ids(self) -> list[str]:
        """The open requests."""
        return list(self._handle_of)

    @property
    def load(self) -> Load:
        """What waits by the newest heartbeat, and what was sent and is not part of it yet; and what runs."""
        return Load(self.stats.waiting + self._sent - self._received, self.stats.running)

    def refuse_running(self, request: Request) -> None:
        """Raise RequestError when a request with the same id is open."""
        if request.id in self._handle_of:
            raise RequestError(f"A request with the id {request.id!r} is running already.", param="request_id")

    def refuse_beyond(self, max_queued: int, count: int) -> None:
        """Raise CapacityError when `count` more requests would make the queue longer than `max_queued`."""
        waiting = self.load.waiting
        if waiting + count > max_queued:
            full = CapacityError(f"The queue is full (waiting: {waiting}); try again later.")
            full.retry_after = self._admissions.retry_after(waiting, monotonic())
            raise full

    def new_handle(self) -> int:
        """A handle that was never used."""
        return next(self._handles)

    def open(self, handle: int, request: Request, stream: TokenStream) -> None:
        """Record a request that is about to be sent."""
        self._parts[handle] = Part(stream, request.id)
        self._handle_of[request.id] = handle
        self._sent += 1
        self.idle.clear()

    def take(self, step: Step) -> None:
        """Record one step of the engine."""
        self.stats, self._received = step.stats, step.received
        parts = self._parts
        for started in step.started:
            self._admissions.note(monotonic())
            if (part := parts.get(started.handle)) is not None:
                part.cached_tokens, part.queue_seconds = started.cached_tokens, started.queue_seconds
        for handle, entries in step.prompt_logprobs:
            if (part := parts.get(handle)) is not None:
                part.prompt_logprobs += entries
                part.stream.notify(part)
        for row, entry in enumerate(step.logprobs):
            if entry is not None and (part := parts.get(step.handles[row])) is not None:
                part.logprobs.append(entry)
        for handle, token in zip(step.handles, step.tokens, strict=True):
            if (part := parts.get(handle)) is not None:
                part.tokens.append(token)
                part.stream.notify(part)
        for handle, vector in step.vectors:
            if (part := parts.get(handle)) is not None:
                part.vector = vector
        for finished in step.finished:
            self._finish(finished)

    def refuse(self, handle: int, error: StokerError) -> None:
        """The engine does not run a request; its stream raises `error`."""
        if (part := self._close(handle)) is not None:
            part.stream.fail(error)

    def abort(self, request_ids: Iterable[str]) -> list[int]:
        """End requests here; the handles of those that were open."""
        handles = [handle for each in request_ids if (handle := self._handle_of.get(each)) is not None]
        for handle in handles:
            self._finish(Finished(handle, FinishReason.ABORT))
        return handles

    def fail_all(self, error: StokerError) -> list[int]:
        """End every open stream with `error`; the handles of their requests."""
        handles = list(self._parts)
        for handle in handles:
            if (part := self._close(handle)) is not None:
                part.stream.fail(error)
        return handles

    def _finish(self, finished: Finished) -> None:
        if (part := self._close(finished.handle)) is not None:
            part.finish, part.stop_token, part.error = finished.reason, finished.stop_token, finished.error
            part.complete = finished.complete
            part.stream.notify(part)

    def _close(self, handle: int) -> Part | None:
        part = self._parts.pop(handle, None)
        if part is not None:
            del self._handle_of[part.request_id]
        if not self._parts:
            self.idle.set()
        return part
