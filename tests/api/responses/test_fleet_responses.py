"""Stored responses of a server with several API processes: whichever of them is asked, it knows them all."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import CLIENT, wait_until
from server_process import FRESH, ServerProcess, children, figures, fleet

TEMPLATE = "{% for message in messages %}{{ message.content }}!{% endfor %}"
RUNNING = 'vllm:num_requests_running{model_name="uniform"}'


def start(*flags: str) -> ServerProcess:
    return fleet("slow", "--chat-template", TEMPLATE, *flags)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    found = start()
    yield found.wait_ready()
    found.close()


def call(server: ServerProcess, method: str, path: str = "", **body: Any) -> httpx.Response:
    """A request over a connection of its own, so that any process may get it."""
    return CLIENT.request(method, f"{server.url}/v1/responses{path}", json=body or None, headers=FRESH)


def create(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = call(server, "POST", input="12", max_output_tokens=3, ignore_eos=True, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def makers(server: ServerProcess) -> set[str]:
    """The processes that answered a POST."""
    return set(re.findall(r"\[(api \d)\] stoker.access: POST", server.log))


def test_any_process_knows_every_response(server: ServerProcess) -> None:
    made = [create(server) for _ in range(12)]
    assert wait_until(lambda: len(makers(server)) == 2)
    for response in made:
        assert call(server, "GET", f"/{response['id']}").json() == response
    for at in range(8):
        following = create(server, previous_response_id=made[at]["id"])
        assert following["usage"]["input_tokens"] > made[at]["usage"]["input_tokens"]
    for response in made:
        assert call(server, "DELETE", f"/{response['id']}").json()["deleted"]
        assert {call(server, "GET", f"/{response['id']}").status_code for _ in range(4)} == {404}


def test_streamed_ones_too(server: ServerProcess) -> None:
    body = {"input": "12", "stream": True, "max_output_tokens": 3}
    for _ in range(4):
        text = CLIENT.post(f"{server.url}/v1/responses", json=body, headers=FRESH).text
        name = re.findall(r'"id":"(resp_\w+)"', text)[0]
        assert {call(server, "GET", f"/{name}").json()["status"] for _ in range(4)} == {"incomplete"}


def test_the_background_is_everybodys(server: ServerProcess) -> None:
    names = [create(server, background=True)["id"] for _ in range(6)]
    for name in names:
        assert wait_until(lambda name=name: call(server, "GET", f"/{name}").json()["status"] == "incomplete")
        texts = {call(server, "GET", f"/{name}?stream=true").text for _ in range(4)}
        assert len(texts) == 1
        numbers = [int(number) for number in re.findall(r'"sequence_number":(\d+)', texts.pop())]
        assert numbers == list(range(len(numbers)))


def test_any_process_cancels(server: ServerProcess) -> None:
    names: list[str] = []
    for _ in range(6):
        answer = call(server, "POST", input="12", background=True, ignore_eos=True, max_output_tokens=4000)
        names.append(answer.json()["id"])
    assert wait_until(lambda: figures(server.url)[RUNNING] == 6)
    states = [call(server, "POST", f"/{name}/cancel").json()["status"] for name in names]
    assert states == ["cancelled"] * 6
    assert wait_until(lambda: {figures(server.url)[RUNNING] for _ in range(4)} == {0.0})


def test_what_a_killed_process_was_making_has_failed(
    processes: list[ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    processes.append(start())
    server = processes[0].wait_ready()
    finished = [create(server)["id"] for _ in range(4)]
    names = [
        call(server, "POST", input="12", background=True, ignore_eos=True, max_output_tokens=4000).json()["id"]
        for _ in range(8)
    ]
    assert wait_until(lambda: figures(server.url)[RUNNING] == 8)
    os.kill(children(server.popen.pid)["api 0"], signal.SIGKILL)
    assert wait_until(lambda: "another one starts" in server.log)

    def states() -> list[str]:
        return [call(server, "GET", f"/{name}").json()["status"] for name in names]

    assert wait_until(lambda: "failed" in states(), 20)
    found = states()
    assert set(found) == {"failed", "in_progress"}, "the kernel gave all eight to one process"
    assert {call(server, "GET", f"/{name}").json()["status"] for name in finished} == {"incomplete"}
    lost = names[found.index("failed")]
    assert "event: response.failed" in call(server, "GET", f"/{lost}?stream=true").text
    assert call(server, "POST", f"/{lost}/cancel").json()["status"] == "failed"
    for name in names:
        call(server, "POST", f"/{name}/cancel")
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0
    assert not any(tmp_path.rglob("responses*"))


def test_the_store_ends_with_the_server(
    processes: list[ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    processes.append(start())
    server = processes[0].wait_ready()
    create(server)
    assert any(tmp_path.rglob("responses"))
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}, "prompts are nobody else's business"
    server.signal(signal.SIGKILL)
    assert wait_until(lambda: not any(tmp_path.rglob("responses*")), 20)
