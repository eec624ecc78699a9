"""The life of a whole server with its engine process: start, readiness, drain, signals, a dead engine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import httpx
from api_server import CLIENT, wait_until
from server_process import ServerProcess

SCRIPT = Path(__file__).parents[1] / "uniform_server.py"
BODY = {"prompt": [1, 2, 3], "stream": True, "ignore_eos": True}


def uniform(mode: str, *flags: str) -> ServerProcess:
    """A server whose engine behaves as `mode` says."""
    return ServerProcess([sys.executable, str(SCRIPT), mode], *flags)


class Stream(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, url: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._tokens = url, tokens
        self.events: list[str] = []
        self.start()
        assert wait_until(lambda: bool(self.events), 20)

    def run(self) -> None:
        body = {**BODY, "max_tokens": self._tokens, "stream_options": {"include_usage": True}}
        with CLIENT.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as response:
            try:
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
            except httpx.TransportError:
                self.events.append("cut")

    def result(self) -> list[str]:
        self.join(30)
        assert not self.is_alive()
        return self.events


def test_drain_lets_streams_finish_and_refuses_new_ones(processes: list[ServerProcess]) -> None:
    processes.append(uniform("slow"))
    server = processes[0].wait_ready()
    ready = r"ready in .* s \(tokenizer .*, engine .*, warm-up .*\); serving uniform"
    assert wait_until(lambda: bool(re.search(ready, server.log))), server.log
    stream = Stream(server.url, 250)
    server.signal(signal.SIGTERM)
    assert wait_until(lambda: CLIENT.get(f"{server.url}/ready").status_code == 503)
    assert CLIENT.get(f"{server.url}/health").status_code == 200
    refused = CLIENT.post(f"{server.url}/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
    events = stream.result()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 250
    assert server.exit_status() == 0
    assert "draining: 1 requests are running" in server.log


def test_drain_ends_after_its_seconds_and_says_so_in_the_stream(processes: list[ServerProcess]) -> None:
    processes.append(uniform("slow", "--drain-seconds", "0.3"))
    server = processes[0].wait_ready()
    stream = Stream(server.url, 4000)
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    events = stream.result()
    assert json.loads(events[-2])["error"]["message"] == "The server is shutting down."
    assert events[-1] == "[DONE]"
    assert server.exit_status() == 0
    assert time.monotonic() - began < 10


def test_a_second_signal_exits_at_once_and_the_engine_goes_too(processes: list[ServerProcess]) -> None:
    processes.append(uniform("slow"))
    server = processes[0].wait_ready()
    stream = Stream(server.url, 4000)
    engines = server.engine_pids()
    assert engines
    server.signal(signal.SIGTERM)
    assert wait_until(lambda: "draining" in server.log)
    server.signal(signal.SIGINT)
    assert server.exit_status(5) == 1
    assert stream.result()[-1] == "cut"
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines), 10)


def test_a_killed_engine_ends_streams_and_shows_in_health(processes: list[ServerProcess]) -> None:
    processes.append(uniform("slow"))
    server = processes[0].wait_ready()
    stream = Stream(server.url, 4000)
    began = time.monotonic()
    for pid in server.engine_pids():
        os.kill(pid, signal.SIGKILL)
    events = stream.result()
    assert time.monotonic() - began < 5
    error = json.loads(events[-2])["error"]
    assert (error["type"], error["message"]) == ("engine_dead", "The engine process ended with signal SIGKILL.")
    assert events[-1] == "[DONE]"
    for path in ("/health", "/ready"):
        assert CLIENT.get(server.url + path).status_code == 503
    assert CLIENT.post(f"{server.url}/v1/completions", json=BODY).json()["error"]["type"] == "engine_dead"
    assert server.exit_status(30) == 1, "only a new server has an engine again"
    assert "ended with signal SIGKILL. The server ends" in server.log


def test_a_failed_start_is_a_status_and_a_sentence(processes: list[ServerProcess]) -> None:
    processes += [uniform("no-model"), uniform("ok", "--tokenizer", "/nonexistent")]
    assert [process.exit_status(30) for process in processes] == [2, 2]
    assert "no such checkpoint" in processes[0].log
    assert "no tokenizer here" in processes[1].log
    assert "Traceback" not in processes[1].log


def test_a_port_in_use_is_named(processes: list[ServerProcess]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        processes.append(uniform("ok", "--port", str(port)))
        assert processes[0].exit_status(30) == 2
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use" in processes[0].log


def test_sigterm_while_starting_stops_cleanly(processes: list[ServerProcess]) -> None:
    processes.append(uniform("ok"))
    url = processes[0].url
    assert CLIENT.get(f"{url}/health").status_code in (200, 503)
    processes[0].signal(signal.SIGTERM)
    assert processes[0].exit_status() == 0
