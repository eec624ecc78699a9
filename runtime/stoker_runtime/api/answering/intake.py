"""What FastAPI hands to a route: the server's state, or all of a request that was let in, read and checked.

Invariants: a body is read only for a caller who was let in. Whatever its bytes, the outcome is a body or a
RequestError; a body's id and time are the request's own where it names none.
Knows nothing of what bodies ask for.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from fastapi import Depends, Request

from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http import reading
from stoker_runtime.api.http.answers import written_as_it_is
from stoker_runtime.api.http.aside import aside
from stoker_runtime.api.http.caller import Caller, let_in
from stoker_runtime.api.http.fields import Body, TimedBody
from stoker_runtime.api.http.routing import Reads
from stoker_runtime.api.http.validation import parse_body

B = TypeVar("B", bound=Body)
T = TypeVar("T")
NUMBERS = 4
"""Times the longest sequence: so many ids may come in lists, beside what any model may be sent."""


class Ask(NamedTuple, Generic[T]):
    """What is asked, by whom and of which server; `body` as the route reads it."""

    state: ServerState
    caller: Caller
    body: T


def server_state(request: Request) -> ServerState:
    """The state of the server that got `request`."""
    found: ServerState = request.app.state.server
    return found


async def _state(request: Request) -> ServerState:
    return server_state(request)


State = Annotated[ServerState, Depends(_state)]


class ReadRaw(Reads):
    """Reads the bytes of a body of a class. Raises TooLargeError or ClientDisconnect."""

    async def __call__(self, request: Request) -> Ask[bytes]:
        """The request with its bytes."""
        # One dependency gives all that a route needs: FastAPI takes longer for three than a small answer does.
        state, caller = server_state(request), let_in(request)
        return Ask(state, caller, await reading.whole(request, state.config.max_body_bytes))


class ReadBody(Reads, Generic[B]):
    """Reads a body of a class. Raises RequestError, TooLargeError or ClientDisconnect."""

    model: type[B]

    def __init__(self, model: type[B]) -> None:
        super().__init__(model)

    async def __call__(self, request: Request) -> Ask[B]:
        """The request with its body, checked."""
        state, caller = server_state(request), let_in(request)
        raw = await reading.whole(request, state.config.max_body_bytes)
        return await ask(raw, self.model, state, caller)


async def read_body(raw: bytes, model: type[B], state: ServerState) -> B:
    """The body that `raw` holds, read beside the event loop where it is large. Raises RequestError."""
    numbers = NUMBERS * state.service.limits.max_model_len if state.service is not None else 0
    return await aside(len(raw), lambda: parse_body(raw, model, numbers))


async def ask(raw: bytes, model: type[B], state: ServerState, caller: Caller) -> Ask[B]:
    """The request whose body `raw` holds. Raises RequestError.

    Where it names no id, its answer carries the request's. Of the times that the body, the header and the server
    allow, the shortest holds.
    """
    body = await read_body(raw, model, state)
    if isinstance(body, TimedBody):
        body.request_id = body.request_id or caller.request_id
        limits = (body.timeout, caller.timeout, state.config.request_timeout or None)
        body.timeout = min((limit for limit in limits if limit is not None), default=None)
    return Ask(state, caller, body)


async def ask_within(payload: Any, model: type[B], state: ServerState, caller: Caller, size: int) -> Ask[B]:
    """The request that `payload` makes, read and checked as if it had come over HTTP. Raises RequestError.

    `size` is about the bytes that it came from.
    """
    return await ask(await aside(size, lambda: raw_of(payload)), model, state, caller)


def raw_of(payload: Any) -> bytes:
    """`payload` as a client would send it."""
    return written_as_it_is(payload)
