"""/sleep, /wake_up and /is_sleeping over HTTP, by a real server of two API processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from api_server import CLIENT, Running, wait_until
from server_process import FRESH, ServerProcess, figures

KEY = "sk-night"
HEADERS = FRESH | {"authorization": f"Bearer {KEY}"}
PROMPT = [72, 101, 108, 108, 111] * 9


@pytest.fixture(scope="module")
def sleepy() -> Iterator[ServerProcess]:
    server = ServerProcess(
        [sys.executable, "-m", "stoker_cli", "serve", "shape:tiny"],
        *("--device", "cpu", "--dtype", "float32", "--served-model-name", "tiny", "--max-num-seqs", "4"),
        *("--enable-sleep-mode", "--api-server-count", "2", "--api-key", KEY),
        *("--chat-template", "{% for message in messages %}[{{ message.content }}]{% endfor %}"),
    )  # fmt: skip
    try:
        assert wait_until(lambda: server.log.count("ready in") == 2 or server.popen.poll() is not None, 180)
        assert server.popen.poll() is None, server.log
        yield server
    finally:
        server.close()


def post(server: ServerProcess, path: str, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    return CLIENT.post(f"{server.url}{path}", json=body, headers=HEADERS | headers, timeout=120)


def status(server: ServerProcess, path: str) -> int:
    return CLIENT.get(f"{server.url}{path}", headers=HEADERS).status_code


def sleeping(server: ServerProcess) -> bool:
    found: bool = CLIENT.get(f"{server.url}/is_sleeping", headers=HEADERS).json()["is_sleeping"]
    return found


def complete(server: ServerProcess, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    return post(server, "/v1/completions", body | {"return_token_ids": True} | more)


def said(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def agreed(server: ServerProcess, ready: int) -> bool:
    """Whether both API processes, which get connections in turn, have heard of it."""
    return all(status(server, "/ready") == ready for _ in range(12))


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_says_the_same_afterwards(sleepy: ServerProcess, level: int) -> None:
    before = said(complete(sleepy))
    assert not sleeping(sleepy)
    answer = post(sleepy, f"/sleep?level={level}")
    assert (answer.status_code, answer.content) == (200, b"")
    assert wait_until(lambda: agreed(sleepy, 503))
    assert sleeping(sleepy)
    assert status(sleepy, "/health") == 200
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        given = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "max_tokens": 2}
        wanted = {
            "/v1/completions": ("prompt", "max_tokens"), "/v1/responses": ("input",),
            "/v1/chat/completions": ("messages", "max_tokens"), "/v1/messages": ("messages", "max_tokens"),
        }[path]  # fmt: skip
        refused = post(sleepy, path, {"model": "tiny"} | {name: given[name] for name in wanted})
        assert refused.status_code == 503, refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert "/wake_up" in refused.json()["error"]["message"]
    told = figures(sleepy.url)
    assert told['vllm:engine_sleep_state{model_name="tiny",sleep_state="awake"}'] == 0
    state = ("weights_offloaded", "discard_all")[level - 1]
    assert told[f'vllm:engine_sleep_state{{model_name="tiny",sleep_state="{state}"}}'] == 1
    assert told['stoker:sleep_freed_bytes{model_name="tiny"}'] >= 2**30, "what --cpu-kv-gb says"
    assert post(sleepy, "/wake_up").status_code == 200
    assert wait_until(lambda: agreed(sleepy, 200))
    assert said(complete(sleepy)) == before
    assert figures(sleepy.url)['vllm:engine_sleep_state{model_name="tiny",sleep_state="awake"}'] == 1


def test_a_stream_that_runs_ends_whole(sleepy: ServerProcess) -> None:
    """While /sleep waits for it, others are refused; the stream has every token that it would have had."""
    whole = said(complete(sleepy, max_tokens=250))
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 250, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = []
    asked = {"json": body | {"stream": True, "return_token_ids": True}, "headers": HEADERS, "timeout": 120}
    with ThreadPoolExecutor(1) as pool, CLIENT.stream("POST", f"{sleepy.url}/v1/completions", **asked) as stream:
        falling = None
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                tokens += choice["token_ids"]
                falling = falling or pool.submit(post, sleepy, "/sleep?level=2&mode=wait")
        assert falling is not None
        assert falling.result(60).status_code == 200
    assert tokens == whole
    assert sleeping(sleepy)
    assert [post(sleepy, f"/wake_up?tags={tag}").status_code for tag in ("kv_cache", "weights")] == [200, 200]
    assert wait_until(lambda: agreed(sleepy, 200))
    assert said(complete(sleepy, max_tokens=20)) == whole[:20]


def test_abort_cuts_what_runs_short(sleepy: ServerProcess) -> None:
    """As vLLM says it: finish_reason abort, with the text so far. There are more choices than run at a time."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, sleepy, max_tokens=1900, n=40, temperature=1)
        assert wait_until(lambda: CLIENT.get(f"{sleepy.url}/load", headers=FRESH).json()["running"], 60)
        assert post(sleepy, "/sleep?mode=abort").status_code == 200
        choices = running.result(60).json()["choices"]
    cut = [choice for choice in choices if choice["finish_reason"] == "abort"]
    assert len(choices) == 40
    assert cut
    assert all(len(choice["token_ids"]) < 1900 for choice in cut)
    assert sleeping(sleepy)
    assert post(sleepy, "/wake_up").status_code == 200
    assert wait_until(lambda: agreed(sleepy, 200))


def test_what_is_asked_wrongly(sleepy: ServerProcess) -> None:
    for path, said in (
        ("/sleep?level=0", "level is 0"), ("/sleep?level=deep", "level"), ("/sleep?mode=keep", "not held"),
        ("/sleep?mode=nap", "wait or abort"), ("/wake_up?tags=weights&tags=head", "kv_cache"),
    ):  # fmt: skip
        refused = post(sleepy, path)
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert CLIENT.request(method, f"{sleepy.url}{path}", headers=FRESH).status_code == 401
    assert not sleeping(sleepy)


@pytest.mark.parametrize(("method", "path"), [("POST", "sleep"), ("POST", "wake_up"), ("GET", "is_sleeping")])
def test_there_is_no_such_route_unless_it_was_asked_for(server: Running, method: str, path: str) -> None:
    with openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0) as client:
        ask = client.get if method == "GET" else client.post
        with pytest.raises(openai.NotFoundError, match="--enable-sleep-mode"):
            ask(f"/{path}", cast_to=object)
