"""The open requests of one API process, how they are handed over, and what is known of the engine's queue.

Invariants: a handle is used once; a request leaves the ledger exactly when its last output or error was recorded.
What the engine still says of a request that left is dropped.
Knows nothing of sockets and processes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from time import monotonic

from stoker_runtime.engine.messages import Finished, Step
from stoker_runtime.engine.placing import Load
from stoker_runtime.engine.stream import Part, TokenStream
from stoker_runtime.errors import CapacityError, EngineError, RequestError, StokerError
from stoker_runtime.request import EngineStats, FinishReason, Request
from stoker_runtime.scheduler.rate import AdmissionRate

PIECE_TOKENS = 16 * 1024
"""Of prompts that are checked and packed at once: a few milliseconds."""
REQUEST_TOKENS = 256
"""What a request takes besides its prompt, in tokens of one."""


def in_pieces(requests: Sequence[Request]) -> list[list[Request]]:
    """`requests` in order, in pieces that take about as long each; a prompt that several share counts once."""
    pieces: list[list[Request]] = []
    size, prompt = PIECE_TOKENS, None
    for request in requests:
        own = REQUEST_TOKENS + (0 if request.prompt_token_ids is prompt else len(request.prompt_token_ids))
        prompt = request.prompt_token_ids
        if size + own > PIECE_TOKENS:
            pieces.append([])
            size = 0
        pieces[-1].append(request)
        size += own
    return pieces


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
        self._unsent: set[int] = set()
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
        """What waits by the newest heartbeat, and what is not part of it yet; and what runs."""
        return Load(self.stats.waiting + len(self._unsent) + self._sent - self._received, self.stats.running)

    def refuse_running(self, requests: Sequence[Request]) -> None:
        """Raise RequestError when a request with the same id as one of `requests` is open."""
        for request in requests:
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
        """Record a request that is to be sent."""
        self._parts[handle] = Part(stream, request.id)
        self._handle_of[request.id] = handle
        self._unsent.add(handle)
        self.idle.clear()

    def is_open(self, handle: int) -> bool:
        """Whether the request has not ended: by its last output, by an abort or by an error."""
        return handle in self._parts

    def sent(self, handle: int) -> None:
        """What was to be sent was."""
        self._unsent.remove(handle)
        self._sent += 1

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

    def fail(self, stream: TokenStream, error: StokerError) -> list[int]:
        """End one stream with `error`; the handles of its open requests."""
        return self._fail([handle for handle, part in self._parts.items() if part.stream is stream], error)

    def fail_all(self, error: StokerError) -> list[int]:
        """End every open stream with `error`; the handles of their requests."""
        return self._fail(list(self._parts), error)

    def _fail(self, handles: list[int], error: StokerError) -> list[int]:
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
            self._unsent.discard(handle)
        if not self._parts:
            self.idle.set()
        return part


class HandOver:
    """Sends requests to the engine: few at once, many long ones in pieces between which others have their turn."""

    def __init__(
        self, ledger: Ledger, send: Callable[[bytes], object], abort: Callable[[Sequence[int]], None]
    ) -> None:
        """`abort` tells the engine to end the requests of these handles."""
        self._ledger = ledger
        self._send = send
        self._abort = abort
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, requests: Sequence[Request], encoded: Callable[[int, Request], bytes]) -> TokenStream:
        """Open `requests`, all or none, and send what `encoded` makes of each.

        Raises what it raises, where they are few; where they are many, all of them end with that.
        """
        stream = TokenStream()
        pieces = [[(self._ledger.new_handle(), request) for request in piece] for piece in in_pieces(requests)]
        if len(pieces) > 1:
            self._open(chain.from_iterable(pieces), stream)
            task = asyncio.create_task(self._in_turns(pieces, stream, encoded))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return stream
        # Encoded before anything is recorded: what cannot be encoded leaves no trace.
        messages = [(handle, encoded(handle, request)) for piece in pieces for handle, request in piece]
        self._open(chain.from_iterable(pieces), stream)
        for handle, message in messages:
            self._send(message)
            self._ledger.sent(handle)
        return stream

    async def close(self) -> None:
        """Send nothing more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, named: Iterable[tuple[int, Request]], stream: TokenStream) -> None:
        for handle, request in named:
            self._ledger.open(handle, request, stream)

    async def _in_turns(
        self,
        pieces: Sequence[Sequence[tuple[int, Request]]],
        stream: TokenStream,
        encoded: Callable[[int, Request], bytes],
    ) -> None:
        try:
            for piece in pieces:
                for handle, request in piece:
                    # What was aborted meanwhile is not sent.
                    if self._ledger.is_open(handle):
                        self._send(encoded(handle, request))
                        self._ledger.sent(handle)
                await asyncio.sleep(0)
        except Exception as error:
            refused = error if isinstance(error, StokerError) else EngineError(f"A request cannot be sent: {error}")
            self._abort(self._ledger.fail(stream, refused))
