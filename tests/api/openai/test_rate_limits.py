"""Rate limits over HTTP: the openai client, keys with limits of their own, every dialect, batches, processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from api_server import CLIENT, Running, make_state, serve
from batch_server import batch_server, client_of, request_line, upload
from fake_engine import FakeEngine
from pooling_engine import PoolingEngine, make_pooling_state
from server_process import FRESH, ServerProcess, figures, fleet

from stoker_runtime.models.pooling import Pooling, PoolingSpec, Task

FILE = "sk-team-a name=team rpm=4 tpm=0\nsk-team-b name=team rpm=4 tpm=0\nsk-free rpm=0 tpm=0\nsk-plain\n"


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that lets a key ask for 200 tokens a minute, where its file says no other."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(FILE + "".join(f"sk-{at}\n" for at in range(20)))
    engine = FakeEngine()
    yield from serve(make_state(engine, api_key_file=str(file), rate_limit_tokens_per_minute=200), engine)


def client(server: Running, key: str, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=retries)


def ask(server: Running, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    given = {"model": "byte-model", "max_tokens": 2, **body}
    return CLIENT.post(server.url + path, json=given, headers={"authorization": f"Bearer {key}"})


def test_the_openai_client_waits_as_it_is_told(limited: Running) -> None:
    with client(limited, "sk-0", retries=2) as patient:
        began = time.monotonic()
        first = patient.completions.with_raw_response.create(model="byte-model", prompt="x" * 199, max_tokens=1)
        assert first.headers["x-ratelimit-limit-tokens"] == "200"
        assert first.headers["x-ratelimit-remaining-tokens"] == "1"
        assert "x-ratelimit-limit-requests" not in first.headers
        answer = patient.completions.create(model="byte-model", prompt="xyz", max_tokens=1)
    assert answer.choices[0].text == "T"
    assert time.monotonic() - began > 0.8, "200 a minute: three tokens more take nine tenths of a second"
    assert 'stoker:requests_rate_limited_total{limit="tokens",model_name="byte-model"}' in figures(limited.url)


def test_refusals_say_when_and_count_nothing(limited: Running) -> None:
    assert ask(limited, "sk-1", prompt="x" * 150, max_tokens=100).status_code == 200
    with client(limited, "sk-1") as hasty, pytest.raises(openai.RateLimitError) as caught:
        hasty.completions.create(model="byte-model", prompt="x" * 100)
    assert caught.value.code == "rate_limit_exceeded"
    owed = 150 + 100 + 100 - 200
    assert owed * 0.3 - 15 < int(caught.value.response.headers["retry-after"]) <= owed * 0.3
    assert caught.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
    assert caught.value.response.headers["x-ratelimit-reset-tokens"].startswith("1m")
    assert len([each for each in limited.engine.requests if len(each.prompt_token_ids) == 100]) == 0
    counted = CLIENT.post(f"{limited.url}/tokenize", json={"prompt": "x"}, headers={"x-api-key": "sk-1"})
    assert counted.status_code == 200, "only what computes is limited"
    too_long = ask(limited, "sk-1", prompt="x" * 201)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "prompt_exceeds_rate_limit")
    assert "retry-after" not in too_long.headers


def test_streams_are_counted_as_they_end(limited: Running) -> None:
    with client(limited, "sk-2") as found:
        with found.completions.with_streaming_response.create(
            model="byte-model", prompt="x" * 40, max_tokens=90, stream=True
        ) as stream:
            assert stream.headers["x-ratelimit-remaining-tokens"] == "160"
            assert b"[DONE]" in b"".join(stream.iter_bytes())
        answer = ask(limited, "sk-2", prompt="x", n=3, max_tokens=20)
    assert 69 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 150, "without the prompt and the answer"
    assert 8 <= int(ask(limited, "sk-2", prompt="x").headers["x-ratelimit-remaining-tokens"]) < 45, "three choices"


def test_keys_of_one_name_share_its_own_limit(limited: Running) -> None:
    keys = ("sk-team-a", "sk-team-b")
    answers = [ask(limited, keys[at % 2], prompt="x" * 150) for at in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429]
    assert [answers[at].headers["x-ratelimit-remaining-requests"] for at in range(4)] == ["3", "2", "1", "0"]
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    assert 1 <= int(answers[4].headers["retry-after"]) <= 15
    assert {ask(limited, "sk-free", prompt="x" * 150).status_code for _ in range(6)} == {200}


def test_other_dialects_are_charged_once_and_refuse_in_their_words(limited: Running) -> None:
    for key, path, body in (
        ("sk-3", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 150}]}),
        ("sk-4", "/v1/responses", {"input": "x" * 150, "max_output_tokens": 2, "max_tokens": None}),
        ("sk-5", "/v1/messages", {"messages": [{"role": "user", "content": "x" * 150}]}),
        ("sk-6", "/v1/responses", {"input": "x" * 150, "max_output_tokens": 2, "max_tokens": None, "stream": True}),
        ("sk-7", "/v1/responses", {"input": "x" * 150, "max_output_tokens": 2, "max_tokens": None, "background": True}),
    ):
        body = {name: value for name, value in {"max_tokens": 2, **body}.items() if value is not None}
        answers = [
            CLIENT.post(limited.url + path, json={"model": "byte-model", **body}, headers={"x-api-key": key})
            for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 429], (path, body, answers[1].text)
        assert 20 <= int(answers[0].headers["x-ratelimit-remaining-tokens"]) < 50, path
        assert answers[1].json()["error"]["type"] == "rate_limit_error"
    other = anthropic.Anthropic(base_url=limited.url, api_key="sk-5", max_retries=0)
    with other, pytest.raises(anthropic.RateLimitError):
        other.messages.create(model="byte-model", max_tokens=1, messages=[{"role": "user", "content": "x" * 150}])


def test_what_the_server_cannot_serve_costs_nothing(limited: Running) -> None:
    limited.engine.full = True
    try:
        assert {ask(limited, "sk-8", prompt="x" * 150).status_code for _ in range(3)} == {429}
    finally:
        limited.engine.full = False
    assert ask(limited, "sk-8", prompt="x" * 150).status_code == 200


def test_embeddings_are_limited_and_without_keys_all_callers_together() -> None:
    engine = PoolingEngine()
    spec = PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=True)
    state = make_pooling_state(engine, spec, rate_limit_tokens_per_minute=25)
    for running in serve(state, engine):
        body = {"input": ["x" * 10, "y" * 8]}
        headers = ({"x-api-key": "one"}, {"x-api-key": "other"}, {})
        answers = [CLIENT.post(f"{running.url}/v1/embeddings", json=body, headers=each) for each in headers]
        assert [answer.status_code for answer in answers] == [200, 429, 429]
        assert answers[0].headers["x-ratelimit-limit-tokens"] == "25"


def test_lines_of_a_batch_wait_for_the_limit(tmp_path: Path) -> None:
    with batch_server(tmp_path, rate_limit_tokens_per_minute=600) as running, client_of(running) as found:
        big = {"messages": [{"role": "user", "content": "x" * 140}]}
        lines = [request_line(f"line {at}", **big) for at in range(4)]
        long = request_line("too long", messages=[{"role": "user", "content": "x" * 700}])
        batch = found.batches.create(
            input_file_id=upload(found, [*lines, long]), endpoint="/v1/chat/completions", completion_window="24h"
        )
        deadline = time.monotonic() + 120
        while batch.status != "completed" and time.monotonic() < deadline:
            time.sleep(0.05)
            batch = found.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 1)
        assert "prompt_exceeds_rate_limit" in found.files.content(batch.error_file_id or "").text
        refused = 'stoker:requests_rate_limited_total{limit="tokens",model_name="byte-model"}'
        assert figures(running.url)[refused] > 0, "the fourth line waited"


def test_processes_share_a_limit(processes: list[ServerProcess]) -> None:
    processes.append(fleet("ok", "--rate-limit-requests-per-minute", "9"))
    url = processes[0].wait_ready().url
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        body = {"prompt": [1, 2], "max_tokens": 1, "ignore_eos": True}
        codes = list(
            pool.map(
                lambda _: CLIENT.post(f"{url}/v1/completions", json=body, headers=FRESH).status_code,
                range(48),
            )
        )
    passed, flown_in = codes.count(200), math.ceil((time.monotonic() - began) * 9 / 60)
    assert set(codes) == {200, 429}
    assert 9 <= passed <= 9 + flown_in
    assert figures(url)['stoker:requests_rate_limited_total{limit="requests",model_name="uniform"}'] == 48 - passed
