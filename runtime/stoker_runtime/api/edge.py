"""What stands before every route: request ids, API keys, and the error object that every failure becomes.

Invariants: an API key is compared in constant time against every key and never reaches a log; an error leaves as
OpenAI's error object, and an unexpected one says nothing of its cause to the client.
Knows nothing of models or engines.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker_runtime.api.http import Response, json_response
from stoker_runtime.errors import AuthenticationError, CapacityError, StokerError, UnsupportedError

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
    return response


class KeyCheck:
    """Whether a request carries one of the server's API keys; without keys everything passes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __call__(self, authorization: bytes) -> bool:
        """Compare with every key, so that the time taken says nothing about which one was near."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found and scheme.lower() == b"bearer"


def credentials(headers: Mapping[bytes, bytes]) -> bytes:
    """What a client sends to prove itself: a bearer token, or Anthropic's `x-api-key` in its place."""
    given = headers.get(b"authorization", b"")
    key = headers.get(b"x-api-key", b"")
    return given if given or not key else b"Bearer " + key


def request_id_of(given: bytes) -> str:
    """The client's own id where it is a plain one, else a new one."""
    if 0 < len(given) <= MAX_REQUEST_ID and all(0x21 <= byte < 0x7F for byte in given):
        return given.decode("ascii")
    return os.urandom(16).hex()
