"""Streams that do not end well: clients that leave, engines that fail, servers that stop."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from api_server import CLIENT, Running, wait_until

BODY = {"prompt": "hi", "stream": True, "max_tokens": 200}


def read(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_aborts_in_the_engine(server: Running, http: httpx.Client, n: int) -> None:
    server.engine.delay = 0.01
    with CLIENT.stream("POST", f"{server.url}/v1/completions", json={**BODY, "n": n}) as response:
        next(response.iter_lines())
    assert wait_until(lambda: len(server.engine.aborted) == n)
    assert wait_until(lambda: not server.state.active)


def test_disconnect_of_a_client_that_waits_for_the_whole(server: Running) -> None:
    server.engine.delay = 0.01
    with pytest.raises(httpx.ReadTimeout):
        CLIENT.post(f"{server.url}/v1/completions", json={**BODY, "stream": False}, timeout=0.1)
    assert wait_until(lambda: len(server.engine.aborted) == 1)
    assert wait_until(lambda: not server.state.active)


def test_error_before_the_first_token_is_a_plain_error(server: Running, http: httpx.Client) -> None:
    server.engine.fail_after = 0
    for stream in (True, False):
        response = http.post("/v1/completions", json={**BODY, "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "The step failed."


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"prompt": None, "messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_error_in_mid_stream_is_an_event_and_then_done(
    server: Running, http: httpx.Client, path: str, extra: dict[str, object]
) -> None:
    server.engine.fail_after, server.engine.delay = 3, 0.005
    body = {key: value for key, value in {**BODY, **extra}.items() if value is not None}
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        events = read(response)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"] == {
        "message": "The step failed.",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert "choices" in json.loads(events[-3])
    assert not server.state.active


def test_one_failed_choice_ends_the_others(server: Running, http: httpx.Client) -> None:
    server.engine.fail_after = 2
    assert http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 9}).status_code == 500
    assert len(server.engine.aborted) == 1
    assert not server.state.active


def test_shutting_down_says_so_in_the_stream(server: Running, http: httpx.Client) -> None:
    server.engine.delay = 0.01

    def shut_down() -> None:
        for generation in list(server.state.active):
            generation.abort("The server is shutting down.")

    with http.stream("POST", "/v1/completions", json=BODY) as response:
        threading.Timer(0.1, lambda: server.call(shut_down)).start()
        events = read(response)
    assert json.loads(events[-2])["error"]["message"] == "The server is shutting down."
    assert json.loads(events[-2])["error"]["type"] == "service_unavailable"
    assert events[-1] == "[DONE]"


def test_events_that_would_say_nothing_are_left_out(server: Running, http: httpx.Client) -> None:
    server.engine.script = lambda _: list("🙂!".encode())
    server.engine.delay = 0.002
    with http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 5}) as response:
        texts = [json.loads(event)["choices"][0]["text"] for event in read(response)[:-1]]
    assert texts == ["🙂", "!"]


def test_two_hundred_streams_at_once(server: Running) -> None:
    server.engine.delay = 0.002
    finished: list[str] = []

    def one(client: httpx.Client) -> None:
        with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 30}) as response:
            events = [json.loads(event) for event in read(response)[:-1]]
        finished.append("".join(event["choices"][0]["text"] for event in events))

    limits = httpx.Limits(max_connections=50)
    with httpx.Client(base_url=server.url, timeout=30, limits=limits, verify=False) as client:
        threads = [threading.Thread(target=lambda: [one(client) for _ in range(4)]) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(finished) == 200
    assert len(set(finished)) == 1
    assert not server.state.active
