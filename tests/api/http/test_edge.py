"""The edge: API keys, request ids, body limits, the access log, and errors that routing raises."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_server import CLIENT, KEY, Running, make_state, serve, wait_until
from fake_engine import FakeEngine

from stoker_runtime.process.log import LineFormatter

BODY = {"prompt": "hi"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """A server with two API keys and a small body limit."""
    engine = FakeEngine()
    yield from serve(make_state(engine, api_keys=(KEY, "second"), max_body_bytes=1000), engine)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": "bearer second"}, 200),
        ({"x-api-key": "second"}, 200),
        ({"x-api-key": "third"}, 401),
    ],
)
def test_api_key(guarded: Running, header: dict[str, str], status: int) -> None:
    response = CLIENT.post(f"{guarded.url}/v1/completions", json=BODY, headers=header)
    assert response.status_code == status
    if status == 401:
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/openapi.json", "/nothing"])
def test_everything_but_probes_wants_a_key(guarded: Running, path: str) -> None:
    assert CLIENT.get(guarded.url + path).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/metrics", "/load"])
def test_probes_need_no_key(guarded: Running, path: str) -> None:
    assert CLIENT.get(guarded.url + path).status_code == 200


def test_keys_never_reach_log_or_repr(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    CLIENT.post(f"{guarded.url}/v1/completions", json=BODY, headers={"authorization": f"Bearer {KEY}"})
    assert KEY not in caplog.text
    assert KEY not in repr(guarded.state)


def test_body_limit(guarded: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{guarded.url}/v1/completions"
    declared = CLIENT.post(url, content=b"x" * 1001, headers=headers)
    chunked = CLIENT.post(url, content=iter([b"x" * 600, b"x" * 600]), headers=headers)
    for response in (declared, chunked):
        assert response.status_code == 413
        assert "1000" in response.json()["error"]["message"]


def test_request_id_is_the_clients_or_new(http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = [http.get("/v1/models", headers={"x-request-id": given}).headers["x-request-id"] for given in ("", "a b")]
    assert all(len(name) == 32 for name in made)
    assert made[0] != made[1]
    stream = http.post("/v1/completions", json={**BODY, "stream": True}, headers={"x-request-id": "s1"})
    assert stream.headers["x-request-id"] == "s1"


def test_access_log_has_the_id_and_no_prompt(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stoker.access")
    http.post("/v1/completions", json={"prompt": "sesame"}, headers={"x-request-id": "log-1"})
    http.get("/health", headers={"x-request-id": "log-2"})
    http.post("/v1/completions", json=BODY, headers={"x-request-id": "log-3"})
    # A line is written after its answer has been sent, so one of an earlier test may come late.
    assert wait_until(lambda: "log-3" in {record.request_id for record in access_lines(caplog)})
    lines = [record for record in access_lines(caplog) if record.request_id in ("log-1", "log-2", "log-3")]
    assert [record.getMessage().split(" ")[:3] for record in lines] == [["POST", "/v1/completions", "200"]] * 2
    assert [record.request_id for record in lines] == ["log-1", "log-3"]
    assert "sesame" not in caplog.text


def access_lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.name == "stoker.access"]


def test_a_path_cannot_write_a_line_of_the_log(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stoker.access")
    assert http.get("/v1/%0A2031-05-06%2007:08:09.010%20ERROR%20server:%20lost%1b%5b2J").status_code == 404
    assert wait_until(lambda: any("2031" in each.getMessage() for each in access_lines(caplog)))
    (record,) = [each for each in access_lines(caplog) if "2031" in each.getMessage()]
    line = LineFormatter().format(record)
    assert line.isprintable()
    assert "GET /v1/\\n2031-05-06 07:08:09.010 ERROR server: lost\\x1b[2J 404" in line


def test_an_answer_carries_the_id_of_its_request(http: httpx.Client) -> None:
    headers = {"x-request-id": "abc-7"}
    assert http.post("/v1/completions", json=BODY, headers=headers).json()["id"] == "cmpl-abc-7"
    assert http.post("/v1/completions", json={**BODY, "request_id": "own"}, headers=headers).json()["id"] == "cmpl-own"


def test_log_of_requests_has_counts_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stoker.requests")
    engine = FakeEngine()
    for running in serve(make_state(engine, log_requests=True), engine):
        body = {"prompt": "sesame", "max_tokens": 3, "temperature": 0, "logit_bias": {"5": 1}, "request_id": "r"}
        assert CLIENT.post(f"{running.url}/v1/completions", json=body).status_code == 200
    first, last = [record for record in caplog.records if record.name == "stoker.requests"]
    assert first.getMessage() == "received: prompt tokens 6, n=1, max_tokens=3, temperature=0.0, logit_bias=(1)"
    assert last.getMessage().startswith("finished: 6 prompt tokens (2 cached), 3 generated, complete, ")
    assert first.request_id == last.request_id == "cmpl-r"
    assert "sesame" not in caplog.text


def test_unknown_route_and_method(http: httpx.Client) -> None:
    missing = http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "GET /v1/completions: this method is not allowed here."


def test_full_queue_is_429_with_retry_after(server: Running, http: httpx.Client) -> None:
    server.engine.full = True
    for stream in (False, True):
        response = http.post("/v1/completions", json={**BODY, "stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
    assert "stoker:requests_rejected_total" in http.get("/metrics").text


def test_a_bug_is_a_500_that_says_nothing_of_its_cause(
    server: Running, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.script = lambda _: 1 // 0  # type: ignore[return-value]

    def broken(_: object) -> None:
        raise ZeroDivisionError("the secret cause")

    server.engine.submit, kept = broken, server.engine.submit  # type: ignore[method-assign,assignment]
    try:
        response = http.post("/v1/completions", json=BODY)
    finally:
        server.engine.submit = kept  # type: ignore[method-assign]
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert wait_until(lambda: "the secret cause" in caplog.text)
