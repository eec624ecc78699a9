"""Bodies of requests, kept whole while they wait: a pod that is not there yet can take nothing.

Invariants: one body is at most so large, and all of them together; what would be more is refused while it is read. What
was counted is given back, however a request ends.
Knows nothing of what is in them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from stoker_operator import metrics

MIB = 1 << 20


class TooLarge(Exception):
    """A body beyond what one may have; the message is for its client."""


class TooMuch(Exception):
    """More than all may have together."""


class Bodies:
    """At most `largest` bytes of one, `most` of all."""

    def __init__(self, largest: int, most: int) -> None:
        self._largest, self._most = largest, most
        self._kept = 0

    @asynccontextmanager
    async def read(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """The body, counted while it is in use. Raises TooLarge, TooMuch."""
        self._check(request.content_length or 0, request.content_length or 0)
        body = bytearray()
        try:
            async for chunk in request.content.iter_any():
                self._check(len(body) + len(chunk), len(chunk))
                self._count(len(chunk))
                body += chunk
            yield bytes(body)
        finally:
            self._count(-len(body))

    def _check(self, size: int, more: int) -> None:
        if size > self._largest:
            raise TooLarge(f"The body is larger than {self._largest // MIB} MiB, the most that can be held.")
        if self._kept + more > self._most:
            raise TooMuch("Too many large requests wait for pods that start.")

    def _count(self, change: int) -> None:
        self._kept += change
        metrics.ACTIVATOR_BYTES.set(self._kept)
