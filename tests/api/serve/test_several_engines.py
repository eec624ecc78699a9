"""`--data-parallel-size`: several engines behind one port and several API processes, with real clients under load."""

from __future__ import annotations

import concurrent.futures
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from tests.runtime.ranks.server import Server

from stoker_runtime.process.stat import processor_seconds

PATIENCE = 150.0
ENGINES, PROCESSES = 2, 2


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Server, str]]:
    server = Server(
        "shape:tiny", "--device", "cpu", "--cpu-threads", "2", "--data-parallel-size", str(ENGINES),
        "--api-server-count", str(PROCESSES), "--max-num-seqs", "4", "--max-model-len", "512",
    )  # fmt: skip
    try:
        yield server, server.wait_ready(PATIENCE)
    finally:
        server.close()


def by_engine(url: str, series: str, get: Callable[..., httpx.Response] = httpx.get) -> list[float]:
    """A series of each engine, in their order."""
    text = get(f"{url}/metrics", timeout=PATIENCE).text
    found = re.findall(rf'^{series}{{engine="(\d)",model_name="shape:tiny"}} (\S+)$', text, re.MULTILINE)
    assert [number for number, _ in found] == [str(number) for number in range(ENGINES)], text
    return [float(value) for _, value in found]


def test_requests_go_to_all_engines_and_answers_are_one_engine_s(server: tuple[Server, str]) -> None:
    _, url = server
    client = OpenAI(base_url=f"{url}/v1", api_key="-", timeout=PATIENCE)
    before = by_engine(url, "vllm:generation_tokens_total")

    def ask(number: int) -> str:
        prompt = [3 + (number % 4 + at) % 100 for at in range(30)]
        answer = client.completions.create(
            model="shape:tiny", prompt=prompt, max_tokens=12, temperature=0.0, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
        return answer.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, range(48)))
    # The same prompt has the same answer, whichever engine it came from.
    assert len({(number % 4, text) for number, text in enumerate(texts)}) == 4
    deadline, grown = time.monotonic() + PATIENCE, [0.0]
    # Each API process hears of the engines by itself: the next scrape may be of one that has heard less.
    while sum(grown) < 48 * 12:
        assert time.monotonic() < deadline, "the engines did not tell of all tokens"
        time.sleep(0.1)
        grown = [now - then for now, then in zip(by_engine(url, "vllm:generation_tokens_total"), before, strict=True)]
    # The tokens with which each API process warmed up each engine may be told of only now.
    assert sum(grown) - 48 * 12 <= PROCESSES * ENGINES
    assert min(grown) > 0


def test_a_prompt_goes_again_where_it_is_cached(server: tuple[Server, str]) -> None:
    """Of new prompts the engines take turns. By one connection: an API process remembers what it sent itself."""
    _, url = server
    went = []
    with httpx.Client(timeout=PATIENCE) as client:

        def grown(ask: Callable[[], object], series: str, least: float) -> list[float]:
            before = by_engine(url, series, client.get)
            ask()
            deadline, more = time.monotonic() + PATIENCE, [0.0]
            while sum(more) < least:
                assert time.monotonic() < deadline, f"{series} grew by {more}"
                time.sleep(0.05)
                more = [now - then for now, then in zip(by_engine(url, series, client.get), before, strict=True)]
            return more

        for _ in range(6):
            prompt = [random.randrange(3, 250) for _ in range(400)]
            body = {"model": "shape:tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}

            def ask(body: dict[str, object] = body) -> None:
                client.post(f"{url}/v1/completions", json=body).raise_for_status()

            first = grown(ask, "vllm:prefix_cache_queries_total", 400)
            again = grown(ask, "vllm:prefix_cache_hits_total", 1)
            engine = first.index(max(first))
            assert again[engine] >= 350
            assert sum(again) == again[engine]
            went.append(engine)
    assert set(went) == set(range(ENGINES))


def test_engines_of_two_ranks_each() -> None:
    """Four processes compute: two engines with a rank beside each. One that dies ends them all."""
    arguments = ("--device", "cpu", "--cpu-threads", "1", "--data-parallel-size", "2", "--tensor-parallel-size", "2")
    process = Server("shape:tiny", *arguments, "--max-model-len", "512", "--max-num-seqs", "4")
    try:
        url = process.wait_ready(2 * PATIENCE)
        ranks = [pid for pid in family(process.pid) if "ranks.follower" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(ranks) == 2
        before = by_engine(url, "vllm:generation_tokens_total")
        body = {"model": "shape:tiny", "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "ignore_eos": True}

        def ask(_: int) -> str:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
            return str(answer.json()["choices"][0]["text"])

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(ask, range(8)))) == 1
        after = by_engine(url, "vllm:generation_tokens_total")
        assert all(now > then for now, then in zip(after, before, strict=True))
        os.kill(ranks[1], signal.SIGKILL)
        assert process.exit_status(PATIENCE) == 1
        wait_gone(ranks)
    finally:
        process.close()


def wait_gone(pids: list[int]) -> None:
    """Until none of these processes is left."""
    deadline = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "an engine is left"
        time.sleep(0.05)


def family(pid: int) -> list[int]:
    """A process and all that come of it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    return [pid, *(each for child in children for each in family(child))]


def computed(pids: list[int]) -> list[float]:
    """Processor time of each, in seconds."""
    found = [processor_seconds(pid) for pid in pids]
    assert None not in found, "one has ended"
    return [each for each in found if each is not None]


def test_idle_processes_leave_the_processor_alone(server: tuple[Server, str]) -> None:
    """After work, no thread of an engine or a server spins, or wakes often: of two seconds each has some percent."""
    process, _ = server
    pids = family(process.pid)
    assert len(pids) >= 1 + ENGINES + PROCESSES
    time.sleep(0.3)
    before = computed(pids)
    time.sleep(2.0)
    used = {pid: now - then for pid, now, then in zip(pids, computed(pids), before, strict=True)}
    assert max(used.values()) < 0.25, used
    assert sum(used.values()) < 0.15 * len(pids), used


def test_a_dead_engine_ends_the_server_and_says_which(server: tuple[Server, str]) -> None:
    process, _ = server
    core = "stoker_runtime.engine"
    engines = [pid for pid in family(process.pid) if core in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(engines) == ENGINES
    os.kill(engines[1], signal.SIGKILL)
    assert process.exit_status(PATIENCE) == 1
    assert "Engine 1: The engine process ended with signal SIGKILL" in process.log
    wait_gone(engines)
