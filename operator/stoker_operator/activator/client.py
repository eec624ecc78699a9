"""The client's side of one request: what it is sent while it waits, the pod's answer, or why there is none.

Invariants: a stream that is held for long is begun, and gets comments, so that no proxy on the way takes the silence
for death; from then on errors come as events of the stream. Nobody else is answered before the pod has: the status is
the pod's. An answer that breaks off at the pod breaks off here, so none looks whole that is not.
Knows nothing of lines and pods.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable
from typing import TypeVar

import aiohttp
from aiohttp import web

from stoker_operator.activator.answers import error_answer, error_body, error_event
from stoker_operator.activator.forward import Answer, PodFailed, passed_on
from stoker_operator.observe.pod_http import read_at_most

T = TypeVar("T")
STREAM = "text/event-stream"
LARGEST_ERROR = 1 << 20
# Parsed beside the event loop from there on.
_LARGE_BYTES = 1 << 18
_STREAM_HEADERS = {"Content-Type": f"{STREAM}; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# A router that forgets idle connections forgets none that is asked about so often, in seconds.
_PROBE_SECONDS = 15


class Client:
    """Who asked. `heartbeat` in seconds."""

    def __init__(self, request: web.BaseRequest, heartbeat: float) -> None:
        self._request, self._heartbeat = request, heartbeat
        self._streams = False
        self._begun: web.StreamResponse | None = None
        _probe_connection(request)

    async def expect(self, body: bytes) -> None:
        """Read from the body whether a stream is asked for."""
        if "json" not in self._request.headers.get("Content-Type", "json"):
            return
        if len(body) < _LARGE_BYTES:
            self._streams = _asks_stream(body)
        else:
            self._streams = await asyncio.to_thread(_asks_stream, body)

    async def while_waiting(self, awaited: Awaitable[T]) -> T:
        """What `awaited` gives, with comments to a stream's client meanwhile."""
        task = asyncio.ensure_future(awaited)
        try:
            while self._streams:
                done, _ = await asyncio.wait([task], timeout=self._heartbeat)
                if done:
                    break
                begun = await self._begin()
                await begun.write(b": held while a pod starts\n\n")
            return await task
        finally:
            task.cancel()

    async def relay(self, answer: Answer) -> web.StreamResponse:
        """Pass the pod's answer on as it comes. Raises PodFailed where it breaks off."""
        upstream = answer.upstream
        if self._begun is not None:
            return await self._relay_into(self._begun, answer)
        head = passed_on(upstream.headers)
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=head)
        if upstream.content_length is not None:
            response.content_length = upstream.content_length
        await self._prepare(response)
        await self._pump(answer, response)
        return response

    async def refuse(self, status: int, text: str, code: str, retry_after: int = 0) -> web.StreamResponse:
        """Say why there is no answer."""
        path = self._request.path
        if self._begun is None:
            response = error_answer(status, text, code, retry_after, path)
            response.force_close()
            return response
        await self._begun.write(error_event(error_body(status, text, code, path), path))
        return self._begun

    async def _relay_into(self, begun: web.StreamResponse, answer: Answer) -> web.StreamResponse:
        """Into a stream that has begun: a stream as it is, anything else as an error."""
        upstream = answer.upstream
        if upstream.status == 200 and upstream.content_type == STREAM:
            await self._pump(answer, begun)
            return begun
        raw = answer.first or await read_at_most(upstream, LARGEST_ERROR)
        try:
            document = json.loads(raw)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            text = f"The pod answered {upstream.status}."
            document = error_body(upstream.status, text, "upstream", self._request.path)
        await begun.write(error_event(document, self._request.path))
        return begun

    async def _pump(self, answer: Answer, response: web.StreamResponse) -> None:
        try:
            async for chunk in answer.chunks():
                await response.write(chunk)
        except asyncio.CancelledError:
            self._break_off()
            raise
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            self._break_off()
            raise PodFailed(f"The pod ended in the middle of its answer ({type(error).__name__}).") from None

    def _break_off(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _begin(self) -> web.StreamResponse:
        if self._begun is None:
            response = web.StreamResponse(headers=_STREAM_HEADERS)
            await self._prepare(response)
            self._begun = response
        return self._begun

    async def _prepare(self, response: web.StreamResponse) -> None:
        # The next request of this client finds the pods themselves.
        response.force_close()
        await response.prepare(self._request)


def _asks_stream(body: bytes) -> bool:
    try:
        document = json.loads(body)
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("stream") is True


def _probe_connection(request: web.BaseRequest) -> None:
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
