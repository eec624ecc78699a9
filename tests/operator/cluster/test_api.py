"""api.py against a real HTTP server on loopback: what reaches it of a request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client as kubernetes

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster, _PlainClient

Object = dict[str, Any]


class Server:
    """Answers with `answers` in turn, else with {}; remembers what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[tuple[int, Object]] = []
        self.asked: list[tuple[str, str, dict[str, str], dict[str, str], bytes]] = []

    async def answer(self, request: web.Request) -> web.Response:
        parts = (request.method, request.path, dict(request.query), dict(request.headers), await request.read())
        self.asked.append(parts)
        status, body = self.answers.pop(0) if self.answers else (200, {})
        return web.json_response(body, status=status)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Any]:
    made: list[Cluster] = []

    def build(**settings: Any) -> Cluster:
        configuration = kubernetes.Configuration()
        configuration.host = server.url
        for key, value in settings.items():
            setattr(configuration, key, value)
        made.append(Cluster(_PlainClient(configuration), 4))
        return made[-1]

    yield build
    for cluster in made:
        await cluster.close()


async def test_an_apply_is_the_manifest_as_it_stands(server: Server, connect: Any) -> None:
    cluster = connect(api_key={"BearerToken": "Bearer secret"})
    meta = {"name": "gült-1", "namespace": "a-b"}
    manifest = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": [{"port": 8081}]}}
    assert await cluster.apply(kinds.SERVICE, manifest, manager="who & why") == {}
    [(method, path, query, headers, body)] = server.asked
    assert (method, path) == ("PATCH", "/api/v1/namespaces/a-b/services/gült-1")
    assert query == {"fieldManager": "who & why", "force": "true"}
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert headers["Authorization"] == "Bearer secret"
    assert json.loads(body) == manifest


async def test_a_token_that_is_renewed_is_used_at_once(server: Server, connect: Any) -> None:
    tokens = iter(["first", "second"])

    async def renew(configuration: kubernetes.Configuration) -> None:
        configuration.api_key = {"BearerToken": f"Bearer {next(tokens)}"}

    cluster = connect(api_key={"BearerToken": "Bearer none"}, refresh_api_key_hook=renew)
    for _ in range(2):
        await cluster.get(kinds.POD, "ns", "p")
    assert [headers["Authorization"] for _, _, _, headers, _ in server.asked] == ["Bearer first", "Bearer second"]


async def test_a_list_asks_for_its_labels_and_goes_on(server: Server, connect: Any) -> None:
    first = {"items": [{"metadata": {"name": "a"}}], "metadata": {"resourceVersion": "5", "continue": "x+/="}}
    server.answers = [(200, first), (200, {"items": [], "metadata": {"resourceVersion": "5"}})]
    found = await connect().list_all(kinds.POD, "ns", "a/b=c,d=e")
    assert [item["metadata"]["name"] for item in found] == ["a"]
    queries = [query for _, _, query, _, _ in server.asked]
    assert [query["labelSelector"] for query in queries] == ["a/b=c,d=e"] * 2
    assert [query.get("continue") for query in queries] == [None, "x+/="]
    assert [body for *_, body in server.asked] == [b"", b""]


async def test_a_proxy_is_asked_in_the_server_s_place(server: Server, connect: Any) -> None:
    cluster = connect(host="http://no.such.host.invalid", proxy=server.url)
    await cluster.get(kinds.POD, "ns", "p")
    [(_, path, _, headers, _)] = server.asked
    assert path == "/api/v1/namespaces/ns/pods/p"
    assert headers["Host"] == "no.such.host.invalid"


async def test_a_refusal_is_told_in_the_server_s_words(server: Server, connect: Any) -> None:
    server.answers = [(422, {"reason": "Invalid", "message": "spec.ports: is too long"})]
    with pytest.raises(ApiError, match=r"422 Invalid: spec\.ports: is too long"):
        await connect().create(kinds.SERVICE, {"metadata": {"namespace": "ns"}})


async def test_a_server_that_is_gone_is_status_0(server: Server, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_operator.cluster.api.TRIES", 1)
    with pytest.raises(ApiError, match="the API server did not answer") as caught:
        await connect(host="http://127.0.0.1:9").get(kinds.POD, "ns", "p")
    assert caught.value.status == 0
