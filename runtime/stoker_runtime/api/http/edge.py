"""What stands before every route: request ids, and the error object that every failure becomes.

Invariants: an error leaves as OpenAI's error object, and an unexpected one says nothing of its cause to the client.
Knows nothing of models or engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stoker_runtime.api.http.http import Response, json_response
from stoker_runtime.errors import AuthenticationError, CapacityError, DeadlineError, StokerError, UnsupportedError

REQUEST_ID_HEADER = b"x-request-id"
MAX_REQUEST_ID = 128


def error_body(error: StokerError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: StokerError, body: Callable[[StokerError], dict[str, Any]] = error_body) -> Response:
    """The response to an error, in the shape that `body` gives it, with Retry-After where waiting helps."""
    response = json_response(body(error), error.status)
    if isinstance(error, CapacityError):
        response.headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
    elif isinstance(error, UnsupportedError):
        response.headers.append((b"x-should-retry", b"false"))
    elif isinstance(error, AuthenticationError):
        response.headers.append((b"www-authenticate", b"Bearer"))
    elif isinstance(error, DeadlineError):
        # The openai client would send the whole request again.
        response.headers.append((b"x-should-retry", b"false"))
    return response


def request_id_of(given: bytes) -> str:
    """The client's own id where it is a plain one, else a new one."""
    if 0 < len(given) <= MAX_REQUEST_ID and all(0x21 <= byte < 0x7F for byte in given):
        return given.decode("ascii")
    return os.urandom(16).hex()
