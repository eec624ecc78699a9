"""A request whose time is over ends with an error that says so, and frees what it held."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from api_server import CLIENT, Running, make_state, serve, wait_until
from fake_engine import FakeEngine

BODY = {"prompt": "hi", "max_tokens": 200}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("how", ["field", "header"])
def test_whole_answers(server: Running, http: httpx.Client, path: str, body: dict[str, Any], how: str) -> None:
    server.engine.delay = 0.02
    field, header = ({"timeout": 0.1}, {}) if how == "field" else ({}, {"x-request-timeout": "0.1"})
    response = http.post(path, json={**body, **field}, headers=header)
    assert response.status_code == 408
    assert response.json()["error"] == {
        "message": "The request did not finish within its 0.1 seconds.",
        "type": "timeout_error",
        "param": None,
        "code": "deadline_exceeded",
    }
    assert response.headers["x-should-retry"] == "false"
    assert wait_until(lambda: len(server.engine.aborted) == 1)
    assert not server.state.active


def test_streams_end_with_an_event(server: Running, http: httpx.Client) -> None:
    server.engine.delay = 0.02
    with http.stream("POST", "/v1/completions", json={**BODY, "stream": True, "timeout": 0.1, "n": 2}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    assert "choices" in json.loads(events[0])
    assert len(server.engine.aborted) == 2


def test_a_request_in_time_is_untouched(server: Running, http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={**BODY, "timeout": 60})
    assert response.json()["usage"]["completion_tokens"] == 200
    assert not server.engine.aborted


def test_the_servers_own_limit_holds_for_all() -> None:
    engine = FakeEngine()
    engine.delay = 0.02
    for running in serve(make_state(engine, request_timeout=0.1), engine):
        for extra in ({}, {"timeout": 30}):
            response = CLIENT.post(f"{running.url}/v1/completions", json={**BODY, **extra})
            assert response.status_code == 408
            assert "0.1 seconds" in response.json()["error"]["message"]


@pytest.mark.parametrize("given", ["x", "0", "-1", "nan", "1e9"])
def test_bad_values(server: Running, http: httpx.Client, given: str) -> None:
    response = http.post("/v1/completions", json=BODY, headers={"x-request-timeout": given})
    assert response.status_code == 400
    assert "x-request-timeout" in response.json()["error"]["message"]
    if given not in ("x", "nan"):
        response = http.post("/v1/completions", json={**BODY, "timeout": float(given)})
        assert response.json()["error"]["param"] == "timeout"
