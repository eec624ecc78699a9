"""Responses made in the background: the job in the process that makes one, and what any process may do with it.

Invariants: a job outlives its request; its events and its state are in the store a moment after they happen, from where
they are streamed; a cancelled one has freed the engine when whoever cancelled it is answered, unless that takes longer
than END_SECONDS.
Knows nothing of the Responses API's objects.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from stoker_runtime.api.answering.loopback import Translation, ask_stream, inner_request, renamed
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http.edge import error_body
from stoker_runtime.api.http.http import Message, Receive, Request, Send
from stoker_runtime.api.http.sse import HEADERS, EventStream
from stoker_runtime.api.openai.chat import create_chat_completion
from stoker_runtime.api.responses.making import CHAT, Asked, ResponseEvents, streaming
from stoker_runtime.api.responses.store import ResponseStore
from stoker_runtime.errors import EngineError, NotFoundError, StokerError, StorageError

log = logging.getLogger(__name__)
KEEP_UP_SECONDS = 0.05
"""How far the store may be behind, and how soon a job hears of its cancellation."""
TAIL_SECONDS = 0.02
END_SECONDS = 10.0


async def start_job(state: ServerState, request: Request, asked: Asked) -> dict[str, Any]:
    """Let a response be made in the background; what it is like now. Raises what is wrong with the request."""
    cancelled = asyncio.Event()

    async def receive() -> Message:
        await cancelled.wait()
        return {"type": "http.disconnect"}

    inner = inner_request(request, CHAT, streaming(asked.payload), receive)
    with renamed(asked.names):
        stream = await ask_stream(create_chat_completion, state, inner)
    await asyncio.to_thread(state.responses.begin, asked.stored)
    begun = dict(asked.stored.response)
    task = asyncio.create_task(_run(ResponseEvents(state, asked, cancelled), stream, inner))
    # The loop itself holds tasks weakly only.
    state.jobs.add(task)
    task.add_done_callback(state.jobs.discard)
    return begun


async def end_job(store: ResponseStore, name: str) -> None:
    """End a response in the background, if it runs, and wait for that."""
    deadline = asyncio.get_running_loop().time() + END_SECONDS
    while await asyncio.to_thread(store.cancel, name) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(TAIL_SECONDS)


async def _run(events: ResponseEvents, stream: EventStream, inner: Request) -> None:
    """Take all events of `stream`; what comes out is kept."""
    translation = Translation(events)

    async def forward(message: Message) -> None:
        if message["type"] == "http.response.body":
            await translation(message["body"])

    keeping_up = asyncio.create_task(_keep_up(events))
    try:
        await stream.send(inner, forward)
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


class EventReplay:
    """The stored events of a response made in the background, and those to come, behind number `after`."""

    def __init__(self, store: ResponseStore, name: str, after: int = -1) -> None:
        self.status = 200
        self.headers = list(HEADERS)
        self._store = store
        self._name = name
        self._after = after

    async def send(self, request: Request, send: Send) -> None:
        """Send events until the response is over, or the client goes away, which the response outlives."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        gone = asyncio.ensure_future(_disconnected(request.receive))
        over = False
        try:
            while not over and not gone.done():
                try:
                    found, over = await asyncio.to_thread(self._store.events, self._name, self._after)
                except NotFoundError:
                    # Deleted meanwhile.
                    break
                if found:
                    self._after = found[-1][0]
                    body = "".join([text for _, text in found]).encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                elif not over:
                    await asyncio.wait({gone}, timeout=TAIL_SECONDS)
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
