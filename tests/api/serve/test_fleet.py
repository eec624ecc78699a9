"""Several API processes in front of one engine: one port, one queue, one set of figures, one life."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import CLIENT, wait_until
from server_process import FRESH, ServerProcess, children, figures, fleet

from stoker_runtime.bench import http_load
from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.errors import EngineDeadError, EngineError
from stoker_runtime.process.board import WARM
from stoker_runtime.serve.fleet import MOST_DEATHS, Fleet

BODY: dict[str, Any] = {"prompt": [1, 2, 3], "ignore_eos": True, "max_tokens": 5}


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    server = fleet("slow")
    yield server.wait_ready()
    server.close()


def count_of(found: dict[str, float], name: str) -> float:
    return sum(value for series, value in found.items() if series.startswith(name))


def speakers(server: ServerProcess) -> set[str]:
    """The processes that logged an access."""
    return set(re.findall(r"\[(api \d)\] stoker.access: POST", server.log))


def ask(url: str, **more: Any) -> httpx.Response:
    return CLIENT.post(f"{url}/v1/completions", json={**BODY, **more}, headers=FRESH)


class Open:
    """A stream that is read in a thread, and what came of it."""

    def __init__(self, url: str) -> None:
        self.events: list[str] = []
        self._leave = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self.thread.start()

    def _read(self, url: str) -> None:
        body = {**BODY, "stream": True, "max_tokens": 4000}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, verify=False) as response:
                for line in response.iter_lines():
                    self.events += [line] if line else []
                    if self._leave.is_set():
                        return
        except httpx.TransportError:
            self.events.append("cut")

    def leave(self) -> None:
        self._leave.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_every_process_answers_and_tells_of_all(slow: ServerProcess) -> None:
    before = count_of(figures(slow.url), "vllm:request_success")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(slow.url), range(32)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 32
    assert all(answer.json()["usage"]["completion_tokens"] == 5 for answer in answers)
    assert wait_until(lambda: speakers(slow) == {"api 1", "api 2"})
    scrapes = [figures(slow.url) for _ in range(8)]
    assert {count_of(found, "vllm:request_success") for found in scrapes} == {before + 32}
    assert {count_of(found, "vllm:e2e_request_latency_seconds_count") for found in scrapes} == {before + 32}
    for path in ("/health", "/ready", "/load"):
        assert {CLIENT.get(slow.url + path, headers=FRESH).status_code for _ in range(6)} == {200}


def test_equal_request_ids_do_not_collide(slow: ServerProcess) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda at: ask(slow.url, request_id="same", max_tokens=3 + at), range(12)))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == list(range(3, 15))


def test_clients_that_leave_free_their_pages(slow: ServerProcess) -> None:
    streams = [Open(slow.url) for _ in range(6)]
    assert wait_until(lambda: all(stream.events for stream in streams), 20)
    assert wait_until(lambda: figures(slow.url)['vllm:num_requests_running{model_name="uniform"}'] == 6)
    assert {CLIENT.get(f"{slow.url}/load", headers=FRESH).json()["server_load"] for _ in range(6)} == {6}
    assert figures(slow.url)['vllm:kv_cache_usage_perc{model_name="uniform"}'] > 0
    for stream in streams:
        stream.leave()
    for name in ("num_requests_running", "kv_cache_usage_perc"):
        series = f'vllm:{name}{{model_name="uniform"}}'
        assert wait_until(lambda series=series: {figures(slow.url)[series] for _ in range(6)} == {0.0}), series


def test_bench_http_measures_it(slow: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--n", "8", "--rounds", "2", "--input-len", "8", "--output-len", "5", "--vocab", "64"]
    assert http_load.main(["--url", slow.url, *load]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["8", "16"]


def test_a_dead_process_is_replaced_and_counters_stay(processes: list[ServerProcess]) -> None:
    processes.append(fleet("slow"))
    server = processes[0].wait_ready()
    for _ in range(8):
        ask(server.url)
    done = count_of(figures(server.url), "vllm:request_success")
    streams = [Open(server.url) for _ in range(6)]
    assert wait_until(lambda: all(stream.events for stream in streams), 20)
    victim = children(server.popen.pid)["api 0"]
    os.kill(victim, signal.SIGKILL)
    assert wait_until(lambda: "ended with signal SIGKILL; its requests are lost, another one starts" in server.log)
    for _ in range(12):
        assert ask(server.url).status_code == 200
    lost = [stream for stream in streams if stream.events[-1] == "cut"]
    running = 'vllm:num_requests_running{model_name="uniform"}'
    assert wait_until(lambda: figures(server.url)[running] == 6 - len(lost))
    for stream in streams:
        stream.leave()
    assert count_of(figures(server.url), "vllm:request_success") >= done + 12
    assert wait_until(lambda: CLIENT.get(f"{server.url}/load", headers=FRESH).json()["server_load"] == 0)
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0


def test_sigterm_drains_all_of_them(processes: list[ServerProcess]) -> None:
    processes.append(fleet("slow"))
    server = processes[0].wait_ready()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, server.url, max_tokens=300) for _ in range(8)]
        assert wait_until(lambda: CLIENT.get(f"{server.url}/load", headers=FRESH).json()["server_load"] == 8)
        server.signal(signal.SIGTERM)
        assert wait_until(lambda: CLIENT.get(f"{server.url}/ready", headers=FRESH).status_code == 503)
        # Whoever has nothing left to do answers as long as another has.
        assert {CLIENT.get(f"{server.url}/health", headers=FRESH).status_code for _ in range(6)} == {200}
        assert ask(server.url).json()["error"]["code"] == "server_draining"
        assert [answer.result().json()["usage"]["completion_tokens"] for answer in answers] == [300] * 8
    assert server.exit_status() == 0
    assert server.log.count("] serve.server: stopped") == 2


def test_nothing_outlives_the_server(processes: list[ServerProcess]) -> None:
    processes.append(fleet("slow"))
    server = processes[0].wait_ready()
    started = children(server.popen.pid)
    assert len(started) == 3
    server.signal(signal.SIGKILL)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started.values()), 10)


def test_a_dead_engine_shows_in_every_process(processes: list[ServerProcess]) -> None:
    processes.append(fleet("slow"))
    server = processes[0].wait_ready()
    streams = [Open(server.url) for _ in range(16)]  # of which half wait for a row
    assert wait_until(lambda: CLIENT.get(f"{server.url}/load", headers=FRESH).json()["server_load"] == 16)
    os.kill(children(server.popen.pid)["engine"], signal.SIGKILL)
    assert wait_until(lambda: CLIENT.get(f"{server.url}/health", headers=FRESH).status_code == 503)
    assert ask(server.url).json()["error"]["type"] == "engine_dead"
    for stream in streams:
        stream.thread.join(10)
        assert any('"engine_dead"' in event for event in stream.events[-2:]), stream.events[-3:]
    assert server.exit_status(30) == 1, "only a new server has an engine again"
    assert speakers(server) == {"api 1", "api 2"}


def test_failed_starts_are_a_status_and_a_sentence(processes: list[ServerProcess]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        processes += [fleet("no-model"), fleet("ok", "--tokenizer", "/nonexistent"), fleet("ok", "--port", port)]
        assert [process.exit_status(30) for process in processes] == [2, 2, 2]
    assert "no such checkpoint" in processes[0].log
    assert "no tokenizer here" in processes[1].log
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use" in processes[2].log
    assert not any("Traceback" in process.log for process in processes)


def test_sigterm_while_starting_stops_cleanly(processes: list[ServerProcess]) -> None:
    processes.append(fleet("ok"))
    assert processes[0].url
    processes[0].signal(signal.SIGTERM)
    assert processes[0].exit_status() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_that_wait_for_the_engine_end_too(processes: list[ServerProcess], number: signal.Signals) -> None:
    server = fleet("late")
    processes.append(server)
    assert wait_until(lambda: ask(server.url).status_code == 503 and speakers(server) == {"api 1", "api 2"}, 30)
    server.signal(number)
    assert server.exit_status(8) == 0
    assert "ERROR" not in server.log


def test_a_full_queue_is_429_whoever_is_asked(processes: list[ServerProcess]) -> None:
    processes.append(fleet("slow", "--max-queued", "1"))
    server = processes[0].wait_ready()
    running: list[Open] = []
    for _ in range(8):
        # One after the other: the queue has one place.
        running.append(Open(server.url))
        assert wait_until(lambda: bool(running[-1].events), 20)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, server.url) for _ in range(8)]
        assert wait_until(lambda: sum(answer.done() for answer in answers) == 7, 20)
        refused = [answer.result() for answer in answers if answer.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        for stream in running:
            stream.leave()
    assert sorted(answer.result().status_code for answer in answers) == [200] + [429] * 7
    assert figures(server.url)['stoker:requests_rejected_total{model_name="uniform"}'] == 7


class NoEngine:
    """An engine that is there at once."""

    endpoints = ("ipc:///nowhere",)
    closed = False

    async def died(self) -> EngineDeadError:
        await asyncio.Event().wait()
        raise AssertionError("an event that nobody sets was set")

    async def close(self) -> None:
        self.closed = True


async def test_processes_that_keep_ending_end_the_server() -> None:
    engine = NoEngine()

    async def start(_: EngineConfig) -> NoEngine:
        await asyncio.sleep(0)
        return engine

    config = ServerConfig(EngineConfig("m"), port=0, api_server_count=1)
    many = Fleet(config, start, command=(sys.executable, "-c", "import sys; sys.stdin.buffer.read(1); sys.exit(3)"))
    many._board.cells[WARM] = 1.0
    with pytest.raises(EngineError, match="API process 1 ended with exit status 3"):
        await many.run()
    assert len(many._deaths) == MOST_DEATHS
    assert engine.closed
