"""pod_http.py against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from stoker_operator.observe.observe import idle, load
from stoker_operator.observe.pod_http import Address, PodClient, pod_address
from stoker_operator.observe.snapshot import AdapterReport, Idle, Observed, Progress

TLS_FILES = Path(__file__).parents[2] / "api" / "serve" / "tls"
ANSWERS: dict[str, tuple[int, Any]] = {
    "good": (200, {"choices": [{"text": "!"}]}),
    "empty": (200, {"choices": []}),
    "broken": (500, {"error": {"message": "engine died"}}),
    "locked": (401, {"error": {"message": "no key"}}),
    "limited": (429, {"error": {"message": "try again", "code": "rate_limit_exceeded"}}),
    "full": (429, {"error": {"message": "the queue is full", "code": None}}),
    "embeds": (400, {"error": {"message": "it embeds", "code": "model_does_not_generate"}}),
    "mute": (400, {"error": {"message": "it embeds", "code": "model_does_not_generate"}}),
    "refuses": (400, {"error": {"message": "no", "code": None}}),
}


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        assert (body["max_tokens"], body["temperature"]) == (1, 0)
        if body["model"] == "slow":
            await asyncio.sleep(5)
        status, answer = ANSWERS.get(body["model"], (200, "not json at all"))
        return web.json_response(answer, status=status)

    async def score(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["text_1"] == body["text_2"]
        return web.json_response({"data": [{"score": 1.0}] if body["model"] == "embeds" else []})

    async def progress(_: web.Request) -> web.Response:
        return web.json_response({"phase": "download", "bytesDone": 3, "bytesTotal": 10, "etaSeconds": 2.5})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.post("/v1/score", score)])
    app.add_routes([web.get("/progress", progress)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("good", ""),
        ("locked", ""),
        ("limited", ""),
        ("full", "answered 429: "),
        ("embeds", ""),
        ("mute", "without data"),
        ("refuses", "answered 400: "),
        ("empty", "without choices"),
        ("broken", "answered 500: "),
        ("odd", "without choices"),
        ("slow", "no answer"),
    ],
)
async def test_completions(port: int, model: str, error: str) -> None:
    found = await PodClient(0.5).complete(Address("127.0.0.1", port), model)
    assert error in found
    assert bool(found) == bool(error)


async def test_a_pod_nobody_can_reach_is_an_answer_too() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    assert "NetworkPolicy" in await PodClient(0.5).complete(Address("127.0.0.1", closed), "m")
    assert await PodClient(0.5).progress(Address("127.0.0.1", closed)) is None


async def test_progress(port: int) -> None:
    assert await PodClient(0.5).progress(Address("127.0.0.1", port)) == Progress("download", 3, 10, 2)


async def test_a_page_that_comes_in_pieces_is_read_to_its_end() -> None:
    async def metrics(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for number in range(3):
            await answer.write(f"series_{number} 1\n".encode())
            await asyncio.sleep(0.02)
        return answer

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        port = runner.addresses[0][1]
        assert (
            await PodClient(5.0).page(Address("127.0.0.1", port), "/metrics") == "series_0 1\nseries_1 1\nseries_2 1\n"
        )
        assert await PodClient(5.0).page(Address("127.0.0.1", port), "/nothing") == ""
    finally:
        await runner.cleanup()
    assert await PodClient(5.0).page(Address("127.0.0.1", port), "/metrics") == ""


async def test_a_pod_that_speaks_tls_is_asked_by_tls() -> None:
    """Its certificate is for a name and by an authority that nobody told the operator of."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS_FILES / "server.pem", TLS_FILES / "server.key")
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        assert request.secure
        if request.path == "/metrics":
            return web.Response(text=gauges(2, 3))
        said: dict[str, Any] = {"choices": [1]} if request.method == "POST" else {"warnings": ["a word"]}
        return web.json_response(said)

    app.add_routes([web.get("/ready", answer), web.get("/metrics", answer), web.post("/v1/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    pod = engine_pod("127.0.0.1")
    container = pod["spec"]["containers"][0]
    container["ports"][0]["containerPort"] = runner.addresses[0][1]
    container["readinessProbe"] = {"httpGet": {"path": "/ready", "port": "http", "scheme": "HTTPS"}}
    try:
        address = pod_address(pod, "http")
        assert address is not None
        assert await PodClient(5.0).words([address]) == ["a word"]
        assert await PodClient(5.0).complete(address, "m") == ""
        assert await load(PodClient(5.0), Observed(engine_pods=(pod,))) == 5
        del container["readinessProbe"]
        plain = pod_address(pod, "http")
        assert plain is not None
        assert await PodClient(5.0).page(plain, "/metrics") == ""
    finally:
        await runner.cleanup()


def engine_pod(ip: str, *, ready: bool = True, going: bool = False) -> dict[str, Any]:
    container = {"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}
    conditions = [{"type": "Ready", "status": str(ready)}]
    meta = {"name": ip} | ({"deletionTimestamp": "t"} if going else {})
    return {"metadata": meta, "spec": {"containers": [container]}, "status": {"podIP": ip, "conditions": conditions}}


class Pages(PodClient):
    """What each pod says of itself, by its IP."""

    def __init__(self, pages: dict[str, str]) -> None:
        self.pages = pages

    async def page(self, address: Address, path: str) -> str:
        assert (address.port, path) == (8000, "/metrics")
        return self.pages[address.ip]


def gauges(running: int, waiting: int) -> str:
    lines = [f"vllm:num_requests_running {running}", f"vllm:num_requests_waiting {waiting}"]
    return "\n".join([f"# TYPE {line.split()[0]} gauge\n{line}" for line in lines]) + "\n"


@pytest.mark.parametrize(
    ("pods", "pages", "expected"),
    [
        ([], {}, 0),
        ([engine_pod("a"), engine_pod("b")], {"a": gauges(0, 0), "b": gauges(0, 0)}, 0),
        ([engine_pod("a"), engine_pod("b")], {"a": gauges(2, 1), "b": gauges(4, 0)}, 7),
        ([engine_pod("a"), engine_pod("b", ready=False), engine_pod("c", going=True)], {"a": gauges(1, 0)}, 1),
        ([engine_pod("a")], {"a": ""}, 1),
        ([engine_pod("a")], {"a": "no metrics {"}, 1),
        ([engine_pod("")], {}, 1),
    ],
    ids=["no pods", "idle", "busy", "only ready ones count", "silent", "garbled", "no address"],
)
async def test_the_requests_of_ready_pods(pods: list[dict[str, Any]], pages: dict[str, str], expected: int) -> None:
    assert await load(Pages(pages), Observed(engine_pods=tuple(pods))) == expected


def rested(seconds: float, running: int = 0, waiting: int = 0) -> str:
    return gauges(running, waiting) + f"# TYPE stoker:idle_seconds gauge\nstoker:idle_seconds {seconds}\n"


NOT_READY = Idle(0.0, "not all of its pods are ready")
SILENT = Idle(0.0, "pod b does not say for how long it has had no request")
TWO = [engine_pod("a"), engine_pod("b")]
RESTS: dict[str, tuple[list[dict[str, Any]], dict[str, str], Idle]] = {
    "the one that was asked last": (TWO, {"a": rested(71.5), "b": rested(8.25)}, Idle(8.25)),
    "one is busy": (TWO, {"a": rested(71.5), "b": rested(0, running=1)}, Idle(0.0)),
    "one is busy and counts on": (TWO, {"a": rested(71.5), "b": rested(9, running=1)}, Idle(0.0)),
    "one has a queue": (TWO, {"a": rested(9, waiting=2), "b": rested(71.5)}, Idle(0.0)),
    "one is not ready": ([engine_pod("a"), engine_pod("b", ready=False)], {"a": rested(71.5)}, NOT_READY),
    "one has no address": ([engine_pod("a"), engine_pod("")], {"a": rested(71.5)}, NOT_READY),
    "one is going": ([engine_pod("a"), engine_pod("b", going=True)], {"a": rested(71.5)}, Idle(71.5)),
    "one does not answer": (TWO, {"a": rested(71.5), "b": ""}, SILENT),
    "one does not say it": (TWO, {"a": rested(71.5), "b": gauges(0, 0)}, SILENT),
    "one talks nonsense": (TWO, {"a": rested(71.5), "b": "no metrics {"}, SILENT),
    "there are none": ([], {}, NOT_READY),
}


@pytest.mark.parametrize("case", RESTS.values(), ids=RESTS)
async def test_a_service_rests_as_long_as_the_pod_that_was_asked_last(
    case: tuple[list[dict[str, Any]], dict[str, str], Idle],
) -> None:
    pods, pages, expected = case
    assert await idle(Pages(pages), Observed(engine_pods=tuple(pods))) == expected


async def test_what_a_pod_says_of_its_adapters() -> None:
    body: dict[str, Any] = {"adapters": [{"name": "sql", "digest": "sha256:a", "state": "loaded"}, "x"]}

    async def ready(_: web.Request) -> web.Response:
        return web.json_response(body)

    app = web.Application()
    app.add_routes([web.get("/ready", ready)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        assert await PodClient(5.0).adapters(Address("127.0.0.1", port)) == (
            AdapterReport("sql", "sha256:a", "loaded"),
        )
        body.clear()
        assert await PodClient(5.0).adapters(Address("127.0.0.1", port)) is None, "it follows no list"
    finally:
        await runner.cleanup()
    assert await PodClient(5.0).adapters(Address("127.0.0.1", port)) is None


WORDS: dict[str, tuple[int, Any, str | None]] = {
    # name: (status, body, what is taken from it)
    "well": (200, {"status": "ready"}, ""),
    "warns": (200, {"status": "ready", "warnings": ["no key", "none at all"]}, "no key none at all"),
    "starts": (503, {"error": {}}, ""),
    "an older engine": (404, "not found", ""),
    "no list": (200, {"warnings": "x"}, ""),
}


@pytest.mark.parametrize("case", WORDS.values(), ids=WORDS)
async def test_what_a_pod_says_of_itself(case: tuple[int, Any, str | None]) -> None:
    status, body, expected = case

    async def ready(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    app = web.Application()
    app.add_routes([web.get("/ready", ready)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        assert await PodClient(5.0).words([Address("127.0.0.1", port)]) == [expected]
    finally:
        await runner.cleanup()
    assert await PodClient(5.0).words([Address("127.0.0.1", port)]) == [None]


async def test_pods_are_asked_together_and_each_answers_for_itself() -> None:
    """The first connection of each is lost; one of them never answers."""
    tries: Counter[int] = Counter()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        port = writer.get_extra_info("sockname")[1]
        tries[port] += 1
        if tries[port] > 1:
            body = b'{"warnings": ["from %d"]}' % port
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        writer.close()

    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(3)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    servers[1].close()
    await servers[1].wait_closed()
    try:
        said = await PodClient(5.0).words([Address("127.0.0.1", port) for port in ports])
    finally:
        for server in servers:
            server.close()
    assert said == [f"from {ports[0]}", None, f"from {ports[2]}"]
    assert tries == {ports[0]: 2, ports[2]: 2}
    assert await PodClient(5.0).words([]) == []


async def test_many_pods_do_not_wait_for_one_another() -> None:
    """None of them answers before all were asked."""
    count, everybody = 137, asyncio.Event()
    asked = 0

    async def ready(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == count:
            everybody.set()
        await everybody.wait()
        return web.json_response({"warnings": ["a word"]})

    app = web.Application()
    app.add_routes([web.get("/ready", ready)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=256).start()
    try:
        said = await PodClient(5.0).words([Address("127.0.0.1", runner.addresses[0][1])] * count)
    finally:
        await runner.cleanup()
    assert said == ["a word"] * count
    assert asked == count, "some were given up and asked again"
