"""Generations as answers: event by event as tokens come, or gathered to the end.

Invariants: a stream starts with the first news of the engine, so what fails before it is an ordinary error answer;
after that an error is an event; `[DONE]` comes last in either case. A client that goes away aborts the generation.
A token makes no task, no model object and no copy, and passes no layer of the framework. Events of a long prompt's
log-probabilities are made beside the event loop.
Knows nothing of what events hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from starlette.types import Receive, Scope, Send

from stoker_runtime.api.answering.state import ServerState, Service
from stoker_runtime.api.generate.generation import Answers, Delta, Work, gathered
from stoker_runtime.api.http.aside import LARGE_BYTES, aside
from stoker_runtime.api.http.edge import direct
from stoker_runtime.api.http.errors import error_body
from stoker_runtime.api.http.sse import DONE, Events, abort_on_disconnect, event, part
from stoker_runtime.errors import EngineError, StokerError, UnavailableError

log = logging.getLogger(__name__)


class EventFormat(Protocol):
    """How one route writes deltas as events."""

    def size(self, deltas: Sequence[Delta]) -> int:
        """About how many bytes of their events are more than text: what takes time to make."""
        ...

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas, joined; may be empty."""
        ...

    def closing(self) -> bytes:
        """The events after the last delta, without `[DONE]`; may be empty."""
        ...


async def collect(receive: Receive, generation: Answers) -> list[Delta]:
    """All deltas of a generation. Raises EngineError, or what it was aborted with."""
    deltas: list[Delta] = []
    async with abort_on_disconnect(receive, generation):
        while fresh := await generation.next():
            deltas += fresh
    if generation.aborted is not None:
        raise generation.aborted
    return deltas


class EventStream(Events):
    """The answer of a streaming route. The work is submitted when the answer is sent, and ends with it."""

    def __init__(
        self, state: ServerState, service: Service, work: Work, layout: Callable[[Answers], EventFormat]
    ) -> None:
        super().__init__()
        self._state = state
        self._service = service
        self._work = work
        self._layout = layout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises StokerError when it fails before its first token."""
        await self.run(receive, send, direct(scope, send))

    async def run(self, receive: Receive, begin: Send, send: Send) -> None:
        """Send events until the generation ends: the first message by `begin`. Raises as `__call__` does."""
        with self._state.generate(self._service, self._work) as generation:
            async with abort_on_disconnect(receive, generation):
                first = await generation.next()
                if not first:
                    raise generation.aborted or UnavailableError("The request was aborted.")
                await begin(self.start)
                closing = await self._body(generation, first, send)
        await send(part(closing + DONE, more=False))

    async def _body(self, generation: Answers, deltas: list[Delta], send: Send) -> bytes:
        """Send the events of all deltas; return what closes the stream."""
        try:
            layout, interval = self._layout(generation), self._work.interval
            while deltas:
                if layout.size(deltas) <= LARGE_BYTES:
                    if body := layout.events(deltas):
                        await send(part(body))
                else:
                    await _send_aside(layout, deltas, send)
                deltas = await (generation.next() if interval == 1 else gathered(generation, interval))
            if generation.aborted is not None:
                raise generation.aborted
            return layout.closing()
        except StokerError as error:
            return event(error_body(error))
        except Exception:
            log.exception("A stream failed.")
            return event(error_body(EngineError("The server failed on this request.")))


async def _send_aside(layout: EventFormat, deltas: Sequence[Delta], send: Send) -> None:
    """Send events that take long to make: one after the other, each made beside the event loop."""
    for delta in deltas:
        if body := await aside(layout.size([delta]), partial(layout.events, [delta])):
            await send(part(body))
