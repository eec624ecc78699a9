"""Responses made in the background: the job in the process that makes one, and what any process may do with it.

Invariants: a job outlives its request; its events and its state are in the store a moment after they happen, from where
they are streamed; a cancelled one has freed the engine when whoever cancelled it is answered, unless that takes longer
than END_SECONDS.
Knows nothing of the Responses API's objects.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from stoker_runtime.api.answering.intake import ask_within
from stoker_runtime.api.answering.loopback import Translation, renamed, streamed
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.answering.streams import EventStream
from stoker_runtime.api.http.caller import Caller
from stoker_runtime.api.http.edge import direct
from stoker_runtime.api.http.errors import error_body
from stoker_runtime.api.http.sse import Events, disconnected, part
from stoker_runtime.api.openai.chat import create_chat_completion
from stoker_runtime.api.openai.protocol import ChatBody
from stoker_runtime.api.responses.making import Asked, ResponseEvents, streaming
from stoker_runtime.api.responses.store import ResponseStore
from stoker_runtime.errors import EngineError, NotFoundError, StokerError, StorageError

log = logging.getLogger(__name__)
KEEP_UP_SECONDS = 0.05
"""How far the store may be behind, and how soon a job hears of its cancellation."""
TAIL_SECONDS = 0.02
END_SECONDS = 10.0


@dataclass(slots=True)
class Shelf:
    """What this process keeps of responses: those that clients may ask for again, and the jobs that make some."""

    store: ResponseStore
    jobs: set[asyncio.Task[None]] = field(default_factory=set)


async def start_job(state: ServerState, shelf: Shelf, caller: Caller, asked: Asked) -> dict[str, Any]:
    """Let a response be made in the background; what it is like now. Raises what is wrong with the request."""
    cancelled = asyncio.Event()

    async def receive() -> Message:
        await cancelled.wait()
        return {"type": "http.disconnect"}

    inner = replace(caller, receive=receive)
    with renamed(asked.names):
        ask = await ask_within(streaming(asked.payload), ChatBody, state, inner, asked.size)
        stream = streamed(await create_chat_completion(ask))
    await asyncio.to_thread(shelf.store.begin, asked.stored)
    begun = dict(asked.stored.response)
    task = asyncio.create_task(_run(ResponseEvents(state, shelf.store, asked, cancelled), stream, inner))
    # The loop itself holds tasks weakly only.
    shelf.jobs.add(task)
    task.add_done_callback(shelf.jobs.discard)
    return begun


async def end_job(store: ResponseStore, name: str, owner: str) -> None:
    """End a response in the background, if it runs, and wait for that."""
    deadline = asyncio.get_running_loop().time() + END_SECONDS
    while await asyncio.to_thread(store.cancel, name, owner) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(TAIL_SECONDS)


async def _run(events: ResponseEvents, stream: EventStream, inner: Caller) -> None:
    """Take all events of `stream`; what comes out is kept."""
    translation = Translation(events)

    async def begin(_: Message) -> None:
        """Nobody waits for a status."""

    async def forward(message: Message) -> None:
        await translation(message["body"])

    keeping_up = asyncio.create_task(_keep_up(events))
    try:
        await stream.run(inner.receive, begin, forward)
    except StokerError as error:
        await events.failed(error_body(error)["error"])
    except Exception:
        log.exception("A response in the background failed.", extra={"request_id": inner.request_id})
        await events.failed(error_body(EngineError("The server failed on this request."))["error"])
    finally:
        keeping_up.cancel()


async def _keep_up(events: ResponseEvents) -> None:
    """Store what is new of a job every moment, and hear there whether its end is wanted."""
    while True:
        await asyncio.sleep(KEEP_UP_SECONDS)
        try:
            await events.advance()
        except StorageError as error:
            log.error("The events of a response in the background wait: %s", error.message)


class EventReplay(Events):
    """The stored events of a response made in the background, and those to come, behind number `after`."""

    def __init__(self, store: ResponseStore, name: str, owner: str, after: int = -1) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._owner = owner
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the response is over, or the client goes away, which the response outlives."""
        await send(self.start)
        send = direct(scope, send)
        gone = asyncio.ensure_future(disconnected(receive))
        over = False
        try:
            while not over and not gone.done():
                try:
                    found, over = await asyncio.to_thread(self._store.events, self._name, self._after, self._owner)
                except NotFoundError:
                    # Deleted meanwhile.
                    break
                if found:
                    self._after = found[-1][0]
                    body = "".join([text for _, text in found]).encode()
                    await send(part(body))
                elif not over:
                    await asyncio.wait({gone}, timeout=TAIL_SECONDS)
        finally:
            gone.cancel()
        await send(part(b"", more=False))
