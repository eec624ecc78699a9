"""A proxy before a real API server that does what one under stress does: it throttles, refuses, hangs up before or
after it did what it was asked, forgets where a watch stood, breaks watches off and lets them lag.

Invariants: every request gets the next fault of its sort's cycle; what is not faulted is passed on as it is. It listens
on loopback.
Knows nothing of what the objects mean.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import ssl
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

_PASSED = ("Content-Type", "Accept", "Authorization")


@dataclass(frozen=True)
class Fault:
    """`status`: answered in the server's place, with `retry_after` in seconds where it is not 0. `hang_up`: "before" or
    "after" the server did it. Of watches `expired` says that its place is forgotten, `events` after how many it breaks
    off (-1 = never), and `lag` how many seconds each event waits.
    """

    status: int = 0
    retry_after: int = 0
    hang_up: str = ""
    expired: bool = False
    events: int = -1
    lag: float = 0.0


FINE = Fault()
THROTTLED = Fault(status=429, retry_after=1)
CONFLICT, ERROR, AWAY, FORGOTTEN = Fault(status=409), Fault(status=500), Fault(status=503), Fault(status=410)
LOST_REQUEST, LOST_ANSWER = Fault(hang_up="before"), Fault(hang_up="after")
EXPIRED, BROKEN, LAGGING = Fault(expired=True), Fault(events=2), Fault(lag=0.3)


@dataclass
class Proxy:
    """Open it with `open`. `writes`, `reads`, `watches` and `rests` (of lists that were begun) are the faults of each
    sort, in turn; `out` says of which paths nothing is answered now. `passed` are the writes that reached the server,
    as (method, path); `met` the faults.
    """

    real: Path
    kubeconfig: Path
    writes: Iterator[Fault] = field(default_factory=lambda: itertools.repeat(FINE))
    reads: Iterator[Fault] = field(default_factory=lambda: itertools.repeat(FINE))
    watches: Iterator[Fault] = field(default_factory=lambda: itertools.repeat(FINE))
    rests: Iterator[Fault] = field(default_factory=lambda: itertools.repeat(FINE))
    out: Callable[[str], bool] = lambda _: False
    passed: list[tuple[str, str]] = field(default_factory=list)
    met: set[Fault] = field(default_factory=set)

    async def open(self) -> None:
        """Listen, and write the kubeconfig that leads here."""
        config = yaml.safe_load(self.real.read_text())
        cluster = config["clusters"][0]["cluster"]
        trusted = ssl.create_default_context(cafile=cluster.get("certificate-authority"))
        if "certificate-authority-data" in cluster:
            authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
            trusted = ssl.create_default_context(cadata=authority)
        self._url = cluster["server"]
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted, limit=0))
        app = web.Application(client_max_size=2**24)
        app.add_routes([web.route("*", "/{path:.*}", self._answer)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._runner.addresses[0][1]}"}
        self.kubeconfig.write_text(yaml.safe_dump(config))

    async def close(self) -> None:
        """End all connections."""
        await self._runner.cleanup()
        await self._session.close()
        await asyncio.sleep(0.3)  # a TLS connection ends when both sides said so, for which the loop has to live

    def calm(self) -> None:
        """No faults any more."""
        self.writes = self.reads = self.watches = self.rests = itertools.repeat(FINE)
        self.out = lambda _: False

    def _sort(self, request: web.Request) -> Iterator[Fault]:
        if "watch" in request.query:
            return self.watches
        if "continue" in request.query:
            return self.rests
        return self.reads if request.method == "GET" else self.writes

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.out(request.path):
            return _refusal(AWAY)
        watch = "watch" in request.query
        fault = next(self._sort(request))
        self.met.add(fault)
        if fault.hang_up == "before":
            return _hang_up(request)
        if fault.status:
            return _refusal(fault)
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        asked = self._session.request(
            request.method, self._url + request.raw_path, data=await request.read(), headers=headers
        )
        async with asked as answer:
            if watch and answer.status == 200:
                return await _stream(request, answer, fault)
            body = await answer.read()
            if request.method != "GET":
                self.passed.append((request.method, request.path))
            if fault.hang_up:
                return _hang_up(request)
            return web.Response(status=answer.status, body=body, headers={"Content-Type": "application/json"})


async def _stream(request: web.Request, answer: aiohttp.ClientResponse, fault: Fault) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    if fault.expired:
        said = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        await response.write(json.dumps({"type": "ERROR", "object": said}).encode() + b"\n")
        return response
    told = itertools.count(1)
    async for line in answer.content:
        await asyncio.sleep(fault.lag)
        await response.write(line)
        if next(told) == fault.events:
            return _hang_up(request)
    return response


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _refusal(fault: Fault) -> web.Response:
    said: dict[str, Any] = {"kind": "Status", "status": "Failure", "code": fault.status, "message": "as injected"}
    headers = {"Retry-After": str(fault.retry_after)} if fault.retry_after else {}
    return web.json_response(said, status=fault.status, headers=headers)


def turns(faults: Iterable[Fault], calm: int) -> Iterator[Fault]:
    """The faults one after the other, for ever, with so many requests between them that fare well."""
    return itertools.cycle([each for fault in faults for each in (*[FINE] * calm, fault)])
