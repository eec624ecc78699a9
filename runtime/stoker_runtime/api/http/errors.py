"""What every failure becomes: OpenAI's error object, or another dialect's.

Invariants: an unexpected failure says nothing of its cause to the client; who waits is told for how long.
Knows nothing of models or engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.errors import (
    AuthenticationError,
    CapacityError,
    DeadlineError,
    RequestError,
    StokerError,
    UnsupportedError,
)

Shape = Callable[[StokerError], dict[str, Any]]
"""How a dialect writes errors."""


class MethodError(RequestError):
    """A route that exists, but not for this method."""

    status = 405

    def __init__(self, message: str, allowed: str) -> None:
        """`allowed`: the methods that there are, as the header names them."""
        super().__init__(message)
        self.allowed = allowed


def error_body(error: StokerError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_answer(error: StokerError, shape: Shape = error_body) -> JsonAnswer:
    """The answer to a request that failed."""
    return JsonAnswer(shape(error), error.status, _headers(error))


def _headers(error: StokerError) -> dict[str, str]:
    if isinstance(error, CapacityError):
        # Rounded up: who came back a moment too early would be refused again.
        return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    if isinstance(error, AuthenticationError):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, MethodError):
        return {"allow": error.allowed}
    if isinstance(error, DeadlineError | UnsupportedError):
        # The openai client would send the whole request again.
        return {"x-should-retry": "false"}
    return {}
