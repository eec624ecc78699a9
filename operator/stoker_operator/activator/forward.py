"""Sends one request to a pod, as it came, and says whether the pod took it.

Invariants: a request that a pod has begun to work on is never sent again: it is sent anew only where no connection came
about, or where the pod says that it takes none.
Knows nothing of who waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from stoker_operator.activator.directory import Pod
from stoker_operator.observe.pod_http import read_at_most, url_host

CONNECT_SECONDS = 3.0
LARGEST_REFUSAL = 1 << 16
_LARGE_BYTES = 1 << 20
# What is said from one neighbour to the next, and lengths, which are counted anew.
_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "expect",
}  # fmt: skip
_OWN = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_NOT_NOW = ("The server is draining", "The server is starting")


class NotTaken(Exception):
    """The pod has not begun on the request: another one may."""


class PodFailed(Exception):
    """The pod had the request and gave no answer; the message is for the client."""


@dataclass(slots=True)
class _Sent:
    """Set once a request is written. `body`: there is more to it than a head."""

    body: bool
    event: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the pod says. `first` is what was read of its body already."""

    upstream: aiohttp.ClientResponse
    first: bytes = b""

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises aiohttp's errors where it breaks off."""
        if self.first:
            yield self.first
        async for chunk in self.upstream.content.iter_any():
            yield chunk


def make_session() -> aiohttp.ClientSession:
    """Connections to pods: one a request, as long as the request takes."""
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(_head_sent)
    trace.on_request_chunk_sent.append(_chunk_sent)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[trace],
    )


@asynccontextmanager
async def asked(
    session: aiohttp.ClientSession, pod: Pod, request: web.BaseRequest, body: bytes, written: Callable[[], None]
) -> AsyncIterator[Answer]:
    """The pod's answer, for as long as it is read; `written` is called when the pod has the request.

    Raises NotTaken, PodFailed.
    """
    async with await _send(session, pod, request, body, written) as upstream:
        first = b""
        if upstream.status == 503:
            with contextlib.suppress(aiohttp.ClientError):
                first = await read_at_most(upstream, LARGEST_REFUSAL)
            if _takes_none(first):
                raise NotTaken(f"pod {pod[0]} takes no requests now")
        yield Answer(upstream, first)


async def _send(
    session: aiohttp.ClientSession, pod: Pod, request: web.BaseRequest, body: bytes, written: Callable[[], None]
) -> aiohttp.ClientResponse:
    """Write the request, say so, and wait for the head of the answer."""
    sent = _Sent(bool(body))
    url = URL(f"http://{url_host(pod[0])}:{pod[1]}{request.rel_url.raw_path_qs}", encoded=True)
    asking = session.request(
        request.method,
        url,
        headers=passed_on(request.headers),
        data=_payload(body),
        allow_redirects=False,
        skip_auto_headers=_OWN,
        trace_request_ctx=sent,
    )
    try:
        answering = asyncio.ensure_future(asking)
        await _either(answering, sent.event)
        # A pod may answer before it has read all; one that could not be reached has nothing of it.
        if sent.event.is_set() or answering.exception() is None:
            written()
        return await answering
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise NotTaken(f"pod {pod[0]} cannot be reached: {error}") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise PodFailed(f"The pod ended before it answered ({type(error).__name__}).") from None


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """A large body goes out in parts, so that nobody else waits meanwhile."""
    return io.BytesIO(body) if len(body) >= _LARGE_BYTES else body or None


async def _either(answering: asyncio.Future[aiohttp.ClientResponse], sent: asyncio.Event) -> None:
    """Until a request is written, or has failed; whoever is cancelled meanwhile takes it back."""
    writing = asyncio.ensure_future(sent.wait())
    either: list[asyncio.Future[Any]] = [answering, writing]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        answering.cancel()
        raise
    finally:
        writing.cancel()


def passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers that are meant for the other end."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in _HOP | named | {"content-length"}:
            kept.add(name, value)
    return kept


def _takes_none(body: bytes) -> bool:
    """Whether a 503 says that the pod begins nothing now, in whatever dialect."""
    try:
        document = json.loads(body)
    except ValueError:
        return False
    error = document.get("error") if isinstance(document, dict) else None
    return isinstance(error, dict) and str(error.get("message", "")).startswith(_NOT_NOW)


async def _head_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
    if not context.trace_request_ctx.body:
        context.trace_request_ctx.event.set()


async def _chunk_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
    context.trace_request_ctx.event.set()
