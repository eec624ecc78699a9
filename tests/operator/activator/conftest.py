"""An engine of a pod, on loopback, and an activator's ports in front of it, with real sockets on both sides."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stoker_operator.activator.bodies import MIB, Bodies
from stoker_operator.activator.directory import Pod, Sleeper
from stoker_operator.activator.doors import Doors
from stoker_operator.activator.forward import make_session
from stoker_operator.activator.handler import Handler
from stoker_operator.activator.line import Line
from stoker_operator.manifests.activation import ASLEEP, Bounds, Sleep

BOUNDS = Bounds(max_queued=7, max_wait=60, start=23, keys=False, models=("tiny", "alias"))


class Engine:
    """What a pod would answer; `tell` is how. `got` are the requests, in order: (method, path, headers, body)."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str, dict[str, str], bytes]] = []
        self.tell: Callable[[web.Request], Any] = self._plain
        self.left = asyncio.Event()
        self.port = 0

    async def _plain(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"said": json.loads(self.got[-1][3] or b"null")})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        head = {name.lower(): value for name, value in request.headers.items()}
        self.got.append((request.method, request.raw_path, head, await request.read()))
        try:
            answer: web.StreamResponse = await self.tell(request)
        except asyncio.CancelledError:
            self.left.set()
            raise
        return answer

    @property
    def pod(self) -> Pod:
        return "127.0.0.1", self.port


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    app = web.Application(client_max_size=100 * MIB)
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


@dataclass
class Front:
    """The activator's port of one service. `calls` are the wishes that it wakes: (sleep, by)."""

    line: Line
    handler: Handler
    url: str
    calls: list[tuple[str, str]] = field(default_factory=list)

    def becomes(self, **changes: Any) -> None:
        """The service is another by now."""
        self.line.update(replace(self.line.sleeper, **changes))

    def bounds(self, **changes: Any) -> None:
        self.becomes(bounds=replace(self.line.sleeper.bounds, **changes))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
async def front(eventually: Callable[..., Any]) -> AsyncIterator[Front]:
    """A service that sleeps. Heartbeats come every tenth of a second."""
    port, calls = free_port(), list[tuple[str, str]]()
    sleep = Sleep(ASLEEP, "nap-5", "2026-01-01T00:00:00Z", "nobody asked")
    sleeper = Sleeper(("spaces", "tiny"), port, BOUNDS, sleep)
    line = Line(sleeper, lambda found, what: calls.append((found.sleep.name, what)))
    async with make_session() as session:
        handler = Handler({port: line}, session, Bodies(2 * MIB, 3 * MIB), heartbeat=0.1)
        doors = Doors(handler.handle, "127.0.0.1")
        doors.want(frozenset({port}))
        task = asyncio.create_task(doors.run())
        await eventually(lambda: port in doors.open)
        yield Front(line, handler, f"http://127.0.0.1:{port}", calls)
        line.update(None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session
