"""A request at a service's port: held, carried to a pod, answered in its place, or turned away; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from prometheus_client import REGISTRY
from tests.operator.activator.conftest import Engine, Front, free_port

from stoker_operator.activator.doors import Doors

Eventually = Callable[..., Any]


def counted(result: str) -> float:
    labels = {"service_namespace": "spaces", "inferenceservice": "tiny", "result": result}
    return REGISTRY.get_sample_value("stoker_activator_requests_total", labels) or 0.0


async def post(client: aiohttp.ClientSession, front: Front, body: Any, **options: Any) -> tuple[int, Any, Any]:
    async with client.post(f"{front.url}/v1/completions?beta=true", json=body, **options) as answer:
        return answer.status, await answer.json(), answer.headers


async def test_a_request_waits_for_a_pod_and_arrives_as_it_was_sent(
    front: Front, engine: Engine, eventually: Eventually
) -> None:
    before = counted("forwarded")
    body = gzip.compress(json.dumps({"prompt": "Grüße", "n": 3}).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json", "x-request-id": "r-77", "cookie": "a=b"}
    async with httpx.AsyncClient(timeout=60) as client:
        engine.tell = zipped
        asked = asyncio.create_task(
            client.post(f"{front.url}/v1/chat/completions?x=%2F", content=body, headers=headers)
        )
        await eventually(lambda: len(front.line) == 1)
        assert front.calls == [("nap-5", "POST /v1/chat/completions")]
        assert not engine.got
        front.becomes(pods=(engine.pod,))
        answer = await asked
    [(method, path, got, sent)] = engine.got
    assert (method, path, sent) == ("POST", "/v1/chat/completions?x=%2F", body)
    assert {name: got[name] for name in headers} == headers
    assert got["host"] == front.url.removeprefix("http://"), "the host is the one that was asked"
    assert (answer.status_code, answer.text, answer.headers["x-odd"]) == (418, "packed", "1")
    assert answer.headers["connection"] == "close", "the next request would find no pod"
    assert counted("forwarded") == before + 1


async def zipped(_: web.Request) -> web.Response:
    packed = gzip.compress(b"packed")
    return web.Response(status=418, body=packed, headers={"Content-Encoding": "gzip", "X-Odd": "1"})


async def test_a_stream_passes_event_by_event(front: Front, engine: Engine, client: aiohttp.ClientSession) -> None:
    more = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await more.wait()
        await response.write(b"data: 2\n\n")
        return response

    engine.tell = stream
    front.becomes(pods=(engine.pod,))
    async with client.post(f"{front.url}/v1/completions", json={"stream": True}) as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
        more.set()
        assert await answer.content.read() == b"data: 2\n\n"
        assert answer.headers["Connection"] == "close"


async def test_a_stream_that_waits_gets_comments_and_then_the_pods_events(
    front: Front, engine: Engine, client: aiohttp.ClientSession
) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"data: here\n\n")
        return response

    engine.tell = stream
    async with client.post(f"{front.url}/v1/completions", json={"stream": True}) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        for _ in range(2):
            assert (await answer.content.readuntil(b"\n\n")).startswith(b": ")
        front.becomes(pods=(engine.pod,))
        assert (await answer.content.read()).endswith(b"data: here\n\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_in_a_stream_that_began_an_error_is_an_event(
    front: Front, engine: Engine, client: aiohttp.ClientSession, path: str
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no such model", "code": "model_not_found"}}, status=404)

    engine.tell = refuse
    async with client.post(front.url + path, json={"stream": True}) as answer:
        await answer.content.readuntil(b"\n\n")
        front.becomes(pods=(engine.pod,))
        event = (await answer.content.read()).split(b"\n\n")[-2]
    assert event.startswith(b"event: error\n") == (path == "/v1/messages")
    assert json.loads(event.partition(b"data: ")[2])["error"]["code"] == "model_not_found"


async def test_many_are_let_go_in_the_order_in_which_they_came(
    front: Front, engine: Engine, client: aiohttp.ClientSession
) -> None:
    front.bounds(max_queued=60)
    tasks = []
    for number in range(60):
        tasks.append(asyncio.create_task(post(client, front, {"number": number})))
        async with asyncio.timeout(20):
            while len(front.line) <= number:
                await asyncio.sleep(0.002)
    front.becomes(pods=(engine.pod,))
    answers = await asyncio.gather(*tasks)
    assert [json.loads(body)["number"] for _, _, _, body in engine.got] == list(range(60))
    assert [said["said"]["number"] for _, said, _ in answers] == list(range(60)), "each got its own answer"


@pytest.mark.parametrize("unreachable", [False, True])
async def test_nobody_overtakes_a_stream_nor_who_finds_a_pod_gone(
    front: Front, engine: Engine, client: aiohttp.ClientSession, eventually: Eventually, unreachable: bool
) -> None:
    front.bounds(max_queued=10)
    asking = []
    for number in range(10):
        asking.append(asyncio.create_task(ask(client, front, {"number": number, "stream": number % 3 == 0})))
        await eventually(lambda number=number: len(front.line) == number + 1)
    gone = [("127.0.0.1", free_port())] if unreachable else []
    front.becomes(pods=(*gone, engine.pod))
    await asyncio.gather(*asking)
    assert [json.loads(body)["number"] for *_, body in engine.got] == list(range(10))


async def ask(client: aiohttp.ClientSession, front: Front, body: Any) -> bytes:
    async with client.post(f"{front.url}/v1/completions", json=body) as answer:
        return await answer.read()


async def test_one_too_many_is_told_when_to_come_again(
    front: Front, engine: Engine, client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    before = counted("full")
    tasks = [asyncio.create_task(post(client, front, {"number": number})) for number in range(7)]
    await eventually(lambda: len(front.line) == 7)
    status, said, headers = await post(client, front, {})
    assert (status, said["error"]["type"], headers["Retry-After"]) == (429, "rate_limit_error", "23")
    front.becomes(pods=(engine.pod,))
    assert {status for status, _, _ in await asyncio.gather(*tasks)} == {200}
    assert counted("full") == before + 1
    assert {"nap-5"} == {name for name, _ in front.calls}


async def test_nobody_waits_for_longer_than_he_may(front: Front, client: aiohttp.ClientSession) -> None:
    front.bounds(max_wait=0)
    status, said, headers = await post(client, front, {})
    assert (status, said["error"]["code"], headers["Retry-After"]) == (503, "expired", "23")
    assert len(front.line) == 0


async def test_who_hangs_up_leaves_the_line_and_the_pod(
    front: Front, engine: Engine, client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    before = counted("left")
    waiting = asyncio.create_task(post(client, front, {}))
    await eventually(lambda: len(front.line) == 1)
    waiting.cancel()
    await eventually(lambda: len(front.line) == 0)
    await eventually(lambda: counted("left") == before + 1)

    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    engine.tell = never
    front.becomes(pods=(engine.pod,))
    asking = asyncio.create_task(post(client, front, {}))
    await eventually(lambda: engine.got)
    asking.cancel()
    await asyncio.wait_for(engine.left.wait(), 20)
    await eventually(lambda: front.handler.under_way == 0)


async def test_a_pod_that_dies_before_it_answers_is_no_reason_to_ask_another(
    front: Front, engine: Engine, client: aiohttp.ClientSession
) -> None:
    async def die(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    engine.tell = die
    front.becomes(pods=(engine.pod,))
    status, said, _ = await post(client, front, {})
    assert (status, said["error"]["code"]) == (502, "pod_failed")
    assert len(engine.got) == 1, "it may have been worked on"


async def test_an_answer_that_breaks_off_does_not_look_whole(
    front: Front, engine: Engine, client: aiohttp.ClientSession
) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.close()
        return response

    engine.tell = half
    front.becomes(pods=(engine.pod,))
    with pytest.raises(aiohttp.ClientError):
        async with client.post(f"{front.url}/v1/completions", json={"stream": True}) as answer:
            await answer.content.read()


async def test_a_pod_that_takes_nothing_now_is_asked_again(
    front: Front, engine: Engine, client: aiohttp.ClientSession
) -> None:
    async def draining(request: web.Request) -> web.Response:
        if len(engine.got) < 3:
            text = "The server is draining: it is shutting down."
            return web.json_response({"error": {"message": text, "code": "server_draining"}}, status=503)
        return web.json_response({"said": "now"})

    engine.tell = draining
    front.becomes(pods=(engine.pod,))
    status, said, _ = await post(client, front, {})
    assert (status, said, len(engine.got)) == (200, {"said": "now"}, 3)


async def test_another_503_of_a_pods_is_the_answer(front: Front, engine: Engine, client: aiohttp.ClientSession) -> None:
    async def dead(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "The engine process ended."}}, status=503)

    engine.tell = dead
    front.becomes(pods=(engine.pod,))
    status, said, _ = await post(client, front, {})
    assert (status, said["error"]["message"], len(engine.got)) == (503, "The engine process ended.", 1)


async def test_a_pod_that_is_gone_by_now_is_passed_over(
    front: Front, engine: Engine, client: aiohttp.ClientSession
) -> None:
    front.becomes(pods=(("127.0.0.1", 9), engine.pod))  # nobody listens at the first
    for number in range(2):
        status, said, _ = await post(client, front, {"number": number})
        assert (status, said["said"]["number"]) == (200, number)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/health", 200, '"status": "ok", "phase": "Asleep"'),
        ("/ping", 200, "Asleep"),
        ("/ready", 503, "no pod is ready"),
        ("/metrics", 200, "# No pod runs: Asleep"),
        ("/version", 200, "Asleep"),
        ("/load", 200, '"ready": false'),
        ("/v1/models", 200, '"id": "alias"'),
    ],
)
async def test_who_only_looks_wakes_nobody(
    front: Front, client: aiohttp.ClientSession, path: str, status: int, words: str
) -> None:
    async with client.get(front.url + path) as answer:
        assert answer.status == status
        assert words in await answer.text()
    assert front.calls == []


async def test_a_request_without_a_key_wakes_nobody(
    front: Front, engine: Engine, client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    front.bounds(keys=True)
    for headers in ({}, {"Authorization": "Basic abc"}, {"Authorization": "Bearer "}, {"x-api-key": " "}):
        status, said, answered = await post(client, front, {}, headers=headers)
        assert (status, said["error"]["code"], answered["WWW-Authenticate"]) == (401, "invalid_api_key", "Bearer")
    assert front.calls == []
    for headers in ({"Authorization": "bearer any"}, {"x-api-key": "any"}):
        asked = asyncio.create_task(post(client, front, {}, headers=headers))
        await eventually(lambda: len(front.line) == 1)
        front.becomes(pods=(engine.pod,))
        assert (await asked)[0] == 200
        front.becomes(pods=())


async def test_anthropics_clients_read_their_own_errors(front: Front, client: aiohttp.ClientSession) -> None:
    front.bounds(max_wait=0)
    async with client.post(f"{front.url}/v1/messages", json={}) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (503, "overloaded_error")


async def test_bodies_are_bounded_one_by_one_and_all_together(
    front: Front, engine: Engine, client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    async def chunks(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 65536):
            yield b"x" * 65536

    async def send(size: int, *, told: bool = True) -> int:
        data = io.BytesIO(b"x" * size) if told else chunks(size)
        async with client.post(f"{front.url}/v1/audio", data=data) as answer:
            return answer.status

    async def taken(_: web.Request) -> web.Response:
        return web.Response()

    engine.tell = taken
    for told in (True, False):
        with contextlib.suppress(aiohttp.ClientConnectionError):  # of a body whose rest nobody reads
            assert await send(3 << 20, told=told) == 413
    first = asyncio.create_task(send(3 << 19))
    await eventually(lambda: len(front.line) == 1)
    assert await send(7 << 18) == 503
    front.becomes(pods=(engine.pod,))
    assert await first == 200
    assert await send(7 << 18) == 200, "what was kept is given back"


async def test_the_end_of_a_service_ends_who_waits_for_it(
    front: Front, client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    asked = asyncio.create_task(post(client, front, {}))
    await eventually(lambda: len(front.line) == 1)
    front.line.update(None)
    status, said, _ = await asked
    assert (status, said["error"]["code"]) == (503, "gone")


async def test_a_client_that_vanishes_while_it_is_held_is_missed_by_its_connection(
    client: aiohttp.ClientSession, eventually: Eventually
) -> None:
    """Nothing is sent to who waits without a stream: only the kernel asks whether the client is there."""
    asked: list[int] = []

    async def held(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        accepted = request.transport.get_extra_info("socket")
        asked.append(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        return web.Response()

    port = free_port()
    doors = Doors(held, "127.0.0.1")
    doors.want(frozenset({port}))
    task = asyncio.create_task(doors.run())
    try:
        await eventually(lambda: port in doors.open)
        async with client.post(f"http://127.0.0.1:{port}/v1/completions", json={}) as answer:
            assert answer.status == 200
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert asked == [1]
