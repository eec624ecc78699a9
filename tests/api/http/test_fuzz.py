"""Whatever comes in, the server stays up, says 4xx, and the engine holds nothing afterwards."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import CLIENT, Running, wait_until
from fastapi.routing import iter_route_contexts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_runtime.api.app import KEYED
from stoker_runtime.api.http.fields import Body
from stoker_runtime.api.http.routing import body_of

BODIES: dict[str, type[Body]] = {
    route.path: body
    for router in KEYED
    for route in iter_route_contexts(router.routes)
    if route.path is not None and route.endpoint is not None and (body := body_of(route.endpoint)) is not None
}
POSTS = sorted(BODIES)
DEEP = 100_000
BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "space": b" \n ",
    "no JSON": b"prompt=hi",
    "cut": b'{"prompt": "hi", "max_tokens": ',
    "cut in a character": b'{"prompt": "\xc3',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "NUL outside": b'\x00{"prompt": "hi"}',
    "NUL inside": b'{"prompt": "a\x00b"}',
    "byte order mark": b'\xef\xbb\xbf{"prompt": "hi"}',
    "UTF-16": '{"prompt": "hi"}'.encode("utf-16"),
    "a list": b"[1, 2, 3]",
    "a number": b"1e999",
    "NaN": b'{"prompt": "hi", "temperature": NaN}',
    "Infinity": b'{"prompt": "hi", "temperature": -Infinity}',
    "a huge integer": b'{"prompt": [1], "max_tokens": ' + b"9" * 5000 + b"}",
    "a huge float": b'{"prompt": "hi", "temperature": 1e400}',
    "a huge seed": b'{"prompt": "hi", "seed": ' + b"1" * 400 + b"}",
    "deep lists": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"metadata": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "deep schema": b'{"prompt": "hi", "guided_json": ' + b'{"items":' * 2000 + b"{}" + b"}" * 2000 + b"}",
    "unclosed": b"[" * DEEP,
    "many prompts": json.dumps({"prompt": ["x"] * 100_000, "n": 128}).encode(),
    "many choices": json.dumps({"prompt": ["x"] * 4000, "n": 128}).encode(),
    "many ids": json.dumps({"prompt": [1] * 500_000}).encode(),
    "many messages": json.dumps({"messages": [{"role": "user", "content": "x"}] * 20_000}).encode(),
    "many stops": json.dumps({"prompt": "hi", "stop": ["x"] * 50_000}).encode(),
    "many keys": json.dumps({f"key{at}": at for at in range(20_000)}).encode(),
    "keys twice": b'{"prompt": "hi", "prompt": 5, "model": "a", "model": "b"}',
}
TEXTS = st.text(st.characters(exclude_categories=()), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Running) -> Iterator[None]:
    yield
    assert wait_until(lambda: not server.state.active and not server.engine._streams)
    assert CLIENT.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_bodies(server: Running, path: str, name: str) -> None:
    response = CLIENT.post(server.url + path, content=BROKEN[name], headers={"content-type": "application/json"})
    assert response.status_code < 500 or response.status_code == 501, response.text
    assert len(response.content) < 100_000 or response.status_code == 200
    if response.status_code >= 400:
        assert "error" in response.json()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_wrong_values_in_known_fields(server: Running, path: str, data: st.DataObject) -> None:
    body_class = BODIES[path]
    names = st.sampled_from(sorted(body_class.model_fields))
    body: dict[str, Any] = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user"}]}
    body |= data.draw(st.dictionaries(names, VALUES, max_size=5)) | {"max_tokens": 3}
    response = CLIENT.post(server.url + path, content=json.dumps(body).encode())
    assert response.status_code < 500 or response.status_code == 501, (body, response.text)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /%ff%00%2e%2e/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /v1/models/" + b"a" * 60_000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: \xff\r\nauthorization: \xff\r\nconnection: close\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{",
    ],
)
def test_broken_http(server: Running, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10) as connection:
        connection.sendall(raw)
        if not raw.endswith(b"{"):
            answer = connection.recv(65536)
            assert b" 500 " not in answer[:20]
    assert CLIENT.post(f"{server.url}/v1/completions", json={"prompt": "hi"}).status_code == 200
