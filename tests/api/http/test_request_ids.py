"""A client's `x-request-id` through every route: in the answer whatever it is, and in what the engine is asked."""

from __future__ import annotations

import secrets

import httpx
import pytest
from api_server import Running

ASKED = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"model": "byte-model", "input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"model": "byte-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


def test_every_answer_of_every_route_carries_it(server: Running, http: httpx.Client) -> None:
    """Good and bad answers alike: bodies are empty, names name nothing, models do not embed."""
    paths = http.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        for method in (*operations, "patch"):
            given = secrets.token_urlsafe(20)
            answer = http.request(method, path.replace("{name}", "nothing"), headers={"x-request-id": given})
            assert answer.headers.get_list("x-request-id") == [given], (method, path)
    given = secrets.token_urlsafe(20)
    assert http.get("/no/such/route", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_the_engine_is_asked_under_it(server: Running, http: httpx.Client, path: str, stream: bool) -> None:
    given = secrets.token_hex(8)
    answer = http.post(path, json=ASKED[path] | {"stream": stream}, headers={"x-request-id": given})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == given
    assert [given in request.id for request in server.engine.requests] == [True]
