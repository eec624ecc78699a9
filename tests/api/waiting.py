"""What others feel while a server works on one request: how long `/health` takes, and the gaps of their streams."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
from api_server import CLIENT, Running, wait_until

MOST_SECONDS = 0.1
TRIES = 6
"""A busy machine is late at random; what holds the interpreter does it each time."""
FOX = {"prompt": "hi", "stream": True, "max_tokens": 200}


def longest_gap(during: Callable[[], object], every: Callable[[], object]) -> float:
    """The longest time that `every` took while `during` ran in a thread."""
    worker = threading.Thread(target=during)
    worker.start()
    worst = 0.0
    while worker.is_alive():
        began = time.perf_counter()
        every()
        worst = max(worst, time.perf_counter() - began)
    worker.join()
    return worst


@contextmanager
def watched_stream(url: str, asked: dict[str, Any]) -> Iterator[list[float]]:
    """Gaps between the events of a stream that runs meanwhile, longest last."""
    gaps: list[float] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            last = 0.0
            with CLIENT.stream("POST", f"{url}/v1/completions", json=asked) as response:
                assert response.status_code == 200
                for _ in response.iter_lines():
                    now = time.perf_counter()
                    gaps.append(now - last if last else 0.0)
                    last = now

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert wait_until(lambda: len(gaps) > 3)
        yield gaps
    finally:
        done.set()
        reader.join(30)
    gaps.sort()


@contextmanager
def frozen() -> Iterator[None]:
    """What is there by now is no matter of the collector of garbage, as in a server once it is ready."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def worst_wait(url: str, path: str, raw: bytes, watched: dict[str, Any] | None) -> tuple[httpx.Response, float, float]:
    """What a body is answered, the slowest `/health` meanwhile, and the longest gap of another stream, where there are.
    """
    answers: list[httpx.Response] = []
    json_ = {"content-type": "application/json"}

    def ask() -> None:
        answers.append(httpx.post(url + path, content=raw, headers=json_, timeout=120))

    with frozen(), watched_stream(url, watched) if watched is not None else nullcontext([0.0]) as gaps:
        slowest = longest_gap(ask, lambda: CLIENT.get(f"{url}/health"))
    return answers[0], slowest, gaps[-1]


def judged(server: Running, path: str, body: dict[str, Any], statuses: set[int]) -> httpx.Response:
    """Assert that nobody else waits for MOST_SECONDS while `body` is answered with one of `statuses`."""
    server.engine.delay = 0.005
    pools = server.state.service is not None and server.state.service.pooling is not None
    body["model"] = "byte-model"
    return judged_at(server.url, path, body, statuses, None if pools else FOX)


def judged_at(
    url: str, path: str, body: dict[str, Any], statuses: set[int], watched: dict[str, Any] | None
) -> httpx.Response:
    """As `judged`, of any server; `watched` is what the other stream asks."""
    raw = json.dumps(body, separators=(",", ":")).encode()
    # A million of this process' own objects would be looked through by its collector of garbage meanwhile.
    body.clear()
    found: list[tuple[float, float]] = []
    for _ in range(TRIES):
        answer, slowest, gap = worst_wait(url, path, raw, watched)
        assert answer.status_code in statuses, answer.text[:300]
        found.append((slowest, gap))
        if min(each[0] for each in found) < MOST_SECONDS and min(each[1] for each in found) < MOST_SECONDS:
            return answer
    raise AssertionError(f"{len(raw)} bytes for {path}: slowest /health and longest gap by try: {found}")
