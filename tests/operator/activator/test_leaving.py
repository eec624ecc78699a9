"""The end of an activator's pod that holds requests: SIGTERM to its process, over real sockets and with a real API
server that says where pods are; and what becomes of each kind of request when there is no more time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.operator.activator.conftest import BOUNDS, Engine, Front, free_port
from tests.operator.activator.test_handler import counted, post
from tests.operator.reconcile.sleeping import endpoint_slice
from tests.operator.reconcile.test_sleep import own_address

from stoker_operator.manifests.activation import ASLEEP, Sleep, activator_slice

Eventually = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[3]
LABELS = {"app.kubernetes.io/managed-by": "stoker", "app.kubernetes.io/instance": "demo"}
COMMENT = b": held while a pod starts\n\n"


@dataclass
class Leaver:
    """An activator's process. `port` is that of the service that sleeps."""

    process: asyncio.subprocess.Process
    port: int
    health: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"

    def told_to_end(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def listens(self) -> bool:
        """Whether it takes a connection."""
        try:
            socket.create_connection(("127.0.0.1", self.port), 5).close()
        except ConnectionRefusedError:
            return False
        return True

    async def unready(self, client: aiohttp.ClientSession) -> bool:
        async with client.get(f"http://127.0.0.1:{self.health}/readyz") as answer:
            return answer.status == 503

    async def held(self, client: aiohttp.ClientSession) -> float:
        """By its own count."""
        async with client.get(f"http://127.0.0.1:{self.health}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        mine = [line for line in lines if line.startswith("stoker_activator_held_requests{")]
        return sum(float(line.rpartition(" ")[2]) for line in mine)

    async def holds(self, client: aiohttp.ClientSession, number: int, eventually: Eventually) -> None:
        async def so_many() -> bool:
            return await self.held(client) == number

        await eventually(so_many)


@pytest.fixture
async def leave(
    namespace: str,
    service: Callable[..., Any],
    kubectl: Callable[..., str],
    client: aiohttp.ClientSession,
    eventually: Eventually,
    tmp_path: Path,
) -> AsyncIterator[Callable[..., Any]]:
    """Start the process with flags; it is ready, for a service that sleeps."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*flags: str) -> Leaver:
        port, health = free_port(), free_port()
        sleep = Sleep(ASLEEP, "nap-9", "2026-01-01T00:00:00Z", "nobody asked")
        mine = activator_slice(service("demo"), sleep, BOUNDS, port, "10.99.0.7")
        mine["metadata"] = {key: mine["metadata"][key] for key in ("name", "labels", "annotations")}
        kubectl("create", "-f", "-", stdin=mine)
        command = [sys.executable, "-c", "from stoker_operator.activator.main import main; raise SystemExit(main())"]
        command += [f"--namespaces={namespace}", f"--http-port={health}", "--http-host=127.0.0.1"]
        command += ["--heartbeat-seconds=0.2", *flags]
        with (tmp_path / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, env=os.environ | {"PYTHONWARNINGS": "ignore"}, stdout=log, stderr=log, cwd=ROOT
            )
        started.append(process)
        leaver = Leaver(process, port, health)

        async def ready() -> bool:
            try:
                return not await leaver.unready(client)
            except aiohttp.ClientConnectionError:
                return False

        await eventually(ready)
        return leaver

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text(), (tmp_path / "log").read_text()


@pytest.fixture
async def pod(kubectl: Callable[..., str]) -> AsyncIterator[Callable[[], str]]:
    """Have the service's pod be ready: it answers a stream by events, anything else by its number."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"number": body["number"]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in (str(body["number"]), "[DONE]"):
            await response.write(f"data: {part}\n\n".encode())
            await asyncio.sleep(0.3)
        return response

    address, app = own_address(), web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, address, 0).start()
    labels = {**LABELS, "app.kubernetes.io/component": "engine"}
    there = endpoint_slice("demo-x1", "demo", address, runner.addresses[0][1], **labels)
    yield lambda: kubectl("create", "-f", "-", stdin=there)
    await runner.cleanup()


async def send(client: aiohttp.ClientSession, leaver: Leaver, **body: Any) -> tuple[int, bytes, str]:
    """(status, body, Retry-After)."""
    async with client.post(leaver.url, json=body) as answer:
        return answer.status, await answer.read(), answer.headers.get("Retry-After", "")


@pytest.mark.apiserver
async def test_what_it_holds_when_it_is_told_to_end_goes_on_to_the_pods(
    leave: Callable[..., Any], pod: Callable[[], str], client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    leaver = await leave("--leave-seconds=3", "--drain-seconds=120")
    asked = [asyncio.create_task(send(client, leaver, number=n, stream=n % 2 == 1)) for n in range(4)]
    await leaver.holds(client, 4, eventually)
    leaver.told_to_end()
    await eventually(lambda: leaver.unready(client))
    asked.append(asyncio.create_task(send(client, leaver, number=4)))  # of a router that has not heard of it yet
    await leaver.holds(client, 5, eventually)
    await eventually(lambda: not leaver.listens())
    assert await leaver.held(client) == 5, "its ports are closed, and it holds what it has"
    pod()
    answers = await asyncio.gather(*asked)
    assert [status for status, _, _ in answers] == [200] * 5
    for number, (_, body, _) in enumerate(answers):
        if number % 2 == 1:
            assert body.replace(COMMENT, b"") == f"data: {number}\n\ndata: [DONE]\n\n".encode()
        else:
            assert json.loads(body) == {"number": number}
    assert await asyncio.wait_for(leaver.process.wait(), 60) == 0


@pytest.mark.apiserver
async def test_what_no_pod_came_for_is_told_when_to_come_again_and_the_process_ends(
    leave: Callable[..., Any], client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    leaver = await leave("--leave-seconds=0", "--drain-seconds=2")
    asked = [asyncio.create_task(send(client, leaver, number=n, stream=n == 1)) for n in range(3)]
    await leaver.holds(client, 3, eventually)
    leaver.told_to_end()
    plain, stream, other = await asyncio.wait_for(asyncio.gather(*asked), 60)
    for status, body, again in (plain, other):
        assert (status, json.loads(body)["error"]["code"]) == (503, "ended")
        assert int(again) >= 1
    event = stream[1].replace(COMMENT, b"")
    assert (stream[0], json.loads(event.removeprefix(b"data: "))["error"]["code"]) == (200, "ended")
    assert await asyncio.wait_for(leaver.process.wait(), 60) == 0
    assert not leaver.listens()


async def test_at_the_end_whoever_a_pod_has_not_answered_is_told_so_and_half_an_answer_breaks_off(
    front: Front, engine: Engine, client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    before = counted("ended")

    async def slow(request: web.Request) -> web.StreamResponse:
        if json.loads(engine.got[-1][3]).get("stream"):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
        await asyncio.Event().wait()
        return web.Response()

    engine.tell = slow
    front.becomes(pods=(engine.pod,))
    async with client.post(f"{front.url}/v1/completions", json={"stream": True}) as half:
        assert await half.content.readuntil(b"\n\n") == b"data: 1\n\n"
        unanswered = asyncio.create_task(post(client, front, {}))
        await eventually(lambda: len(engine.got) == 2)
        front.handler.end()
        status, said, headers = await unanswered
        assert (status, said["error"]["type"]) == (503, "service_unavailable")
        assert int(headers["Retry-After"]) >= 1
        with pytest.raises(aiohttp.ClientError):
            await half.content.read()
    await asyncio.wait_for(engine.left.wait(), 20)
    await eventually(lambda: front.handler.under_way == 0)
    assert counted("ended") == before + 2
    late = await post(client, front, {})
    assert (late[0], late[1]["error"]["code"]) == (503, "ended"), "of a connection that was there before"


async def test_a_body_that_is_not_here_yet_does_not_keep_it(
    front: Front, client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    rest = asyncio.Event()

    async def trickle() -> AsyncIterator[bytes]:
        yield b"{"
        await rest.wait()

    asked = asyncio.create_task(client.post(f"{front.url}/v1/completions", data=trickle()))
    await eventually(lambda: front.handler.under_way == 1)
    front.handler.end()
    try:
        async with await asked as answer:
            assert answer.status == 503
    finally:
        rest.set()
    await eventually(lambda: front.handler.under_way == 0)
