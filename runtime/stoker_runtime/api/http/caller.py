"""Who asks, under which id and until when: what a route needs of a request beside its body.

Invariants: a `Caller` is made before anything of a body is read, and only for a request that carries a valid key where
the server has keys.
Knows nothing of what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request
from starlette.types import Receive, Scope

from stoker_runtime.api.http.fields import MAX_TIMEOUT
from stoker_runtime.api.http.keys import KeyRing
from stoker_runtime.errors import AuthenticationError, RequestError

TIMEOUT_HEADER = "x-request-timeout"
REQUEST_ID = "stoker.request_id"
"""Where the edge puts a request's id in its scope."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`receive` tells of the client's disconnect. `timeout` are the seconds that the request's header allows."""

    request_id: str
    receive: Receive
    timeout: float | None = None


def request_id(scope: Scope) -> str:
    """The id of a request."""
    found: str = scope[REQUEST_ID]
    return found


def check_key(request: Request) -> None:
    """Raise AuthenticationError unless `request` carries one of the server's keys, or the server has none."""
    keys: KeyRing = request.app.state.keys
    if not keys.allows(request.headers):
        raise AuthenticationError("The API key is missing or wrong.", code="invalid_api_key")


def let_in(request: Request) -> Caller:
    """The caller of a route that asks for a key. Raises AuthenticationError or RequestError."""
    check_key(request)
    return Caller(request_id(request.scope), request.receive, timeout_header(request))


async def admitted(request: Request) -> Caller:
    """The same, for FastAPI."""
    return let_in(request)


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
