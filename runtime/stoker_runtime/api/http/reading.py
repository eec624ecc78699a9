"""The body of a request, read within bounds.

Invariants: no more than the limit is ever held.
Knows nothing of what bodies mean.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request

from stoker_runtime.errors import TooLargeError


async def pieces(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes. Raises TooLargeError as soon as it passes `limit` bytes, or ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise TooLargeError(f"The body has {int(declared)} bytes; at most {limit} are allowed.")
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise TooLargeError(f"The body has more than {limit} bytes, which is the most allowed.")
        yield piece


async def whole(request: Request, limit: int) -> bytes:
    """The whole body; raises as `pieces` does."""
    parts = [piece async for piece in pieces(request, limit)]
    return parts[0] if len(parts) == 1 else b"".join(parts)
