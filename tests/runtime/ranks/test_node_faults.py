"""Servers of one model on two nodes: whatever is struck, streams end with an error, both end, and start again.

Real processes. Seconds are bounds of patience on a crowded machine, not what it takes.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading

import httpx
import pytest
from tests.runtime.ranks.conftest import free_port
from tests.runtime.ranks.server import Server
from tests.runtime.ranks.test_faults import PATIENCE, children, wait_for

from stoker_runtime.nodes import SECRET_VARIABLE
from stoker_runtime.process.stat import process_exists

MODEL = "shape:tiny"


def start(port: int) -> list[Server]:
    """Both nodes with one command line, as pods of a group have, but for the number."""
    return [
        Server(
            *(MODEL, "--device", "cpu", "--cpu-threads", "1", "--max-num-seqs", "4", "--pipeline-parallel-size", "2"),
            *("--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port)),
        )
        for number in (1, 0)
    ][::-1]


def ask(url: str) -> str:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    return str(answer.json()["choices"][0]["text"])


def strike(url: str, pid: int, number: signal.Signals) -> str:
    """What a stream ends with when a process gets a signal in its midst."""
    errors: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                begun.set()
                if '"error"' in line:
                    errors.append(line)

    client = threading.Thread(target=read)
    client.start()
    assert begun.wait(PATIENCE)
    os.kill(pid, number)
    client.join(PATIENCE)
    assert len(errors) == 1
    return errors[0]


def test_a_group_of_nodes_ends_together_and_is_ready_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    port = free_port()
    servers: list[Server] = []
    texts = []
    try:
        for victim, number, says in (
            ("rank", signal.SIGKILL, "node 1 .*reports: rank 1 ended with signal 9|engine process ended"),
            ("leader", signal.SIGSTOP, "engine process ended with signal SIGKILL"),
        ):
            leader, worker = nodes = start(port)
            servers += nodes
            url = leader.wait_ready(PATIENCE)
            worker.wait_ready(PATIENCE)
            texts.append(ask(url))
            (engine,), (rank,) = children(leader.pid), children(worker.pid)
            error = strike(url, rank if victim == "rank" else engine, number)
            assert re.search(says, error), error
            assert [leader.exit_status(PATIENCE), worker.exit_status(PATIENCE)] == [1, 1]
            wait_for(lambda pids=(engine, rank): not any(map(process_exists, pids)), "a rank is left")  # type: ignore[misc]
        assert texts[0] == texts[1]
        assert all(secret not in server.log for server in servers)
    finally:
        for server in servers:
            server.close()
