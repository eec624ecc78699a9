"""Takes one request at a service's port: answers it quietly, turns it away, or holds it and carries it to a pod.

Invariants: every request ends with an answer and is counted once, by what became of it; one whose client is gone is
given up at once, at the pod as well. After `end` nobody waits any longer, so a process can end with no request lost.
Knows nothing of where services come from and of how a pod is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

import aiohttp
from aiohttp import web

from stoker_operator import metrics
from stoker_operator.activator.answers import error_answer, lacks_key, quiet_answer
from stoker_operator.activator.bodies import Bodies, TooLarge, TooMuch
from stoker_operator.activator.client import Client
from stoker_operator.activator.forward import NotTaken, PodFailed, asked
from stoker_operator.activator.line import Expired, Full, Line, Turned

log = logging.getLogger("stoker.activator")
# After a pod that took nothing.
AGAIN_SECONDS = 0.3
SOON_SECONDS = 5


class Ended(Turned):
    """This process ends, and another replica may hold the request."""

    result = "ended"


class Handler:
    """Knows the lines by port. `heartbeat` in seconds; `under_way` is how many requests have no end yet."""

    def __init__(
        self, lines: Mapping[int, Line], session: aiohttp.ClientSession, bodies: Bodies, heartbeat: float
    ) -> None:
        self._lines, self._session, self._bodies, self._heartbeat = lines, session, bodies, heartbeat
        self.under_way = 0
        self._scopes: set[asyncio.Timeout] = set()
        self._ended = False

    def end(self) -> None:
        """Whoever has no answer is told so at once; an answer that is half-way breaks off."""
        self._ended = True
        for scope in self._scopes:
            scope.reschedule(0)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        name = request.transport.get_extra_info("sockname") if request.transport is not None else None
        line = self._lines.get(name[1]) if name else None
        if line is None:
            return _closing(error_answer(503, "No service is served here now.", "gone", SOON_SECONDS, request.path))
        quiet = quiet_answer(line.sleeper, request.method, request.path)
        if quiet is not None:
            return _closing(quiet)
        self.under_way += 1
        result = "left"
        try:
            result, response = await self._answer(line, request)
            return response
        except ConnectionResetError:
            return web.Response()  # to nobody
        finally:
            self.under_way -= 1
            metrics.ACTIVATOR_REQUESTS.labels(*line.sleeper.key, result).inc()

    async def _answer(self, line: Line, request: web.BaseRequest) -> tuple[str, web.StreamResponse]:
        """(what became of it, the answer)."""
        client = Client(request, self._heartbeat)
        if lacks_key(line.sleeper, request.headers):
            return "refused", await client.refuse(HTTPStatus.UNAUTHORIZED, "The API key is missing.", "invalid_api_key")
        start = line.sleeper.bounds.start
        try:
            line.check_room()
            async with self._until_the_end(), self._bodies.read(request) as body:
                await client.expect(body)
                return "forwarded", await self._carry(line, request, body, client)
        except Full as error:
            return error.result, await client.refuse(HTTPStatus.TOO_MANY_REQUESTS, str(error), "queue_full", start)
        except Ended as error:
            text, soon = str(error), SOON_SECONDS
            return error.result, await client.refuse(HTTPStatus.SERVICE_UNAVAILABLE, text, error.result, soon)
        except Turned as error:
            return error.result, await client.refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error), error.result, start)
        except TooMuch as error:
            return "full", await client.refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error), "queue_full", start)
        except TooLarge as error:
            return "large", await client.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error), "body_too_large")
        except PodFailed as error:
            log.warning("%s/%s: %s %s: %s", *line.sleeper.key, request.method, request.path, error)
            return "failed", await client.refuse(HTTPStatus.BAD_GATEWAY, str(error), "pod_failed")

    @asynccontextmanager
    async def _until_the_end(self) -> AsyncIterator[None]:
        """Within it a request is under way. Raises Ended."""
        scope = asyncio.timeout(0 if self._ended else None)
        self._scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise Ended("This replica of the activator ends before a pod has answered.") from None
        finally:
            self._scopes.discard(scope)

    async def _carry(self, line: Line, request: web.BaseRequest, body: bytes, client: Client) -> web.StreamResponse:
        """To a pod, and to another one while none has begun on it. Raises Turned, PodFailed."""
        came = time.monotonic()
        deadline = came + line.sleeper.bounds.max_wait
        with line.place() as place:
            while True:
                pod = await client.while_waiting(line.pod(place, f"{request.method} {request.path}", deadline))
                try:
                    async with asked(self._session, pod, request, body, partial(line.sent, place)) as answer:
                        metrics.ACTIVATOR_WAIT.labels(*line.sleeper.key).observe(time.monotonic() - came)
                        return await client.relay(answer)
                except NotTaken as error:
                    log.info("%s/%s: %s", *line.sleeper.key, error)
                if time.monotonic() + AGAIN_SECONDS > deadline:
                    raise Expired("The service's pods took no request in time.")
                await client.while_waiting(asyncio.sleep(AGAIN_SECONDS))


def _closing(response: web.Response) -> web.Response:
    response.force_close()
    return response
