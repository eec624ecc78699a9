"""The body of a request, read within bounds of size and time.

Invariants: no more than the limit is ever held; a body that stops coming, or drips, is given up.
Knows nothing of what bodies mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request

from stoker_runtime.errors import DeadlineError, TooLargeError

BODY_SECONDS = 60.0
"""What any body may take, beside what its size takes at the slowest rate."""
LEAST_BYTES_PER_SECOND = 64 * 1024


async def whole(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises TooLargeError as soon as it passes `limit` bytes, DeadlineError when it takes too long, or ClientDisconnect.
    """
    declared = _declared(request, limit)
    parts: list[bytes] = []
    size, begun = 0, _now()
    try:
        async with asyncio.timeout_at(begun + BODY_SECONDS) as patience:
            async for piece in request.stream():
                size += len(piece)
                _check_size(size, limit)
                parts.append(piece)
                if size != declared:
                    patience.reschedule(begun + BODY_SECONDS + size / LEAST_BYTES_PER_SECOND)
    except TimeoutError:
        raise _late(begun) from None
    return b"".join(parts)


async def pieces(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes; raises as `whole` does. What is done with a piece does not count as the body's time."""
    _declared(request, limit)
    size, patience = 0, BODY_SECONDS
    stream = request.stream()
    while True:
        begun = _now()
        try:
            async with asyncio.timeout(patience):
                piece = await anext(stream, None)
        except TimeoutError:
            raise _late(begun) from None
        if piece is None:
            return
        patience += len(piece) / LEAST_BYTES_PER_SECOND - (_now() - begun)
        size += len(piece)
        _check_size(size, limit)
        yield piece


def _now() -> float:
    return asyncio.get_running_loop().time()


def _declared(request: Request, limit: int) -> int | None:
    """The bytes that the request says its body has."""
    said = request.headers.get("content-length", "")
    declared = int(said) if said.isascii() and said.isdigit() else None
    if declared is not None and declared > limit:
        raise TooLargeError(f"The body has {declared} bytes; at most {limit} are allowed.")
    return declared


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise TooLargeError(f"The body has more than {limit} bytes, which is the most allowed.")


def _late(begun: float) -> DeadlineError:
    return DeadlineError(f"The body did not come within {_now() - begun:.0f} seconds.", code="body_timeout")
