"""More choices than the queue will ever hold: a 400 that says so, where a 429 would have the client try for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from api_server import Running

from stoker_runtime.api.http.fields import MAX_CHOICES

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
}


@pytest.fixture
def most(server: Running) -> Iterator[int]:
    """What the server's queue holds."""
    service, most = server.state.service, random.randrange(2, MAX_CHOICES - 1)
    assert service is not None
    server.state.service = replace(service, limits=replace(service.limits, max_queued=most))
    yield most
    server.state.service = service


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_it_is_refused_by_name(server: Running, http: httpx.Client, most: int, path: str, stream: bool) -> None:
    n = random.randrange(most + 1, MAX_CHOICES + 1)
    answer = http.post(path, json={**ASKED[path], "n": n, "stream": stream, "max_tokens": 2})
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert "retry-after" not in answer.headers
    error = answer.json()["error"]
    assert error["param"] == "n"
    assert error["type"] == "invalid_request_error"
    assert f"{n} choices" in error["message"]
    assert f"holds {most} requests (--max-queued)" in error["message"]
    assert not server.engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_as_many_as_it_holds_run(server: Running, http: httpx.Client, most: int, path: str, stream: bool) -> None:
    answer = http.post(path, json={**ASKED[path], "n": most, "stream": stream, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert len(server.engine.requests) == most


def test_choices_that_are_tried_count_too(server: Running, http: httpx.Client, most: int) -> None:
    tried = random.randrange(most + 1, MAX_CHOICES + 1)
    answer = http.post("/v1/completions", json={"prompt": "hi", "best_of": tried, "max_tokens": 2})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "best_of"
    assert not server.engine.requests


def test_prompts_that_are_too_many_are_named(server: Running, http: httpx.Client, most: int) -> None:
    count = most + random.randrange(1, 60)
    answer = http.post("/v1/completions", json={"prompt": ["hi"] * count, "max_tokens": 2})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert not server.engine.requests


def test_a_queue_that_is_full_for_now_is_another_matter(server: Running, http: httpx.Client, most: int) -> None:
    server.engine.full = True
    answer = http.post("/v1/chat/completions", json={**CHAT, "n": most, "max_tokens": 2})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
