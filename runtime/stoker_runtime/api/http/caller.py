"""Who asks, under which id and until when: what a route needs of a request beside its body.

Invariants: a `Caller` is made before anything of a body is read, and only for a request that carries a valid key where
the server has keys.
Knows nothing of what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import Receive, Scope

from stoker_runtime.api.http.fields import MAX_TIMEOUT
from stoker_runtime.api.http.keys import KeyRing
from stoker_runtime.errors import RequestError

TIMEOUT_HEADER = "x-request-timeout"
TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C's trace context."""
REQUEST_ID = "stoker.request_id"
"""Where the edge puts a request's id in its scope."""
ANSWER_HEADERS = "stoker.answer_headers"
"""Where the edge puts the headers that it adds to a request's answer, as they are when the answer begins."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`receive` tells of the client's disconnect. `timeout` are the seconds that the request's header allows.

    `owner` owns what the request makes, and alone may ask for it again; "" where the server has no keys. `trace` are
    the headers by which its spans belong to the client's; () where this server sends no traces. What is put into
    `answer_headers` before the answer begins goes along with it.
    """

    request_id: str
    receive: Receive
    timeout: float | None = None
    owner: str = ""
    trace: tuple[tuple[str, str], ...] = ()
    answer_headers: dict[str, str] = field(default_factory=dict)


def request_id(scope: Scope) -> str:
    """The id of a request."""
    found: str = scope[REQUEST_ID]
    return found


def _keys(request: Request) -> KeyRing:
    keys: KeyRing = request.app.state.keys
    return keys


def check_key(request: Request) -> str:
    """Who owns what `request` makes. Raises AuthenticationError unless it carries a valid key, or there are none."""
    return _keys(request).owner(request.headers)


def let_in(request: Request) -> Caller:
    """The caller of a route that reads a body; it counts for a quota.

    Raises AuthenticationError, CapacityError or RequestError.
    """
    timeout = timeout_header(request)
    owner = _keys(request).spend(request.headers)
    scope = request.scope
    return Caller(request_id(scope), request.receive, timeout, owner, _trace(request), scope[ANSWER_HEADERS])


def _trace(request: Request) -> tuple[tuple[str, str], ...]:
    if not request.app.state.traced:
        return ()
    return tuple((name, value) for name in TRACE_HEADERS if (value := request.headers.get(name)) is not None)


async def admitted(request: Request) -> str:
    """The owner, for routes that read no body. Raises AuthenticationError."""
    return check_key(request)


Owner = Annotated[str, Depends(admitted)]
"""Who asks, where nothing else of the request matters."""


def timeout_header(request: Request) -> float | None:
    """The seconds that the request may take, as its header says. Raises RequestError."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT:
        raise RequestError(f"The header {TIMEOUT_HEADER} must be a number of seconds, at most {MAX_TIMEOUT:g}.")
    return seconds
