"""Batches of servers that end, crash, or share a folder, and what they find there."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import Running, wait_until
from batch_server import (
    CHAT,
    batch_server,
    begin,
    client_of,
    completed,
    prompts,
    request_line,
    results,
    runner_of,
    upload,
    wait_for,
)

from stoker_runtime.api.batch import file_store
from stoker_runtime.api.batch.runner import BatchRunner
from stoker_runtime.errors import ConfigError


def test_a_restart_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    asked = [request_line(f"line-{at}") for at in range(12)]
    with batch_server(tmp_path, batch_concurrency=2) as batch_host, client_of(batch_host) as batch_client:
        batch_host.engine.delay = 0.02
        name = begin(batch_client, asked).id
        place = tmp_path / "batches" / name / "output.jsonl"
        assert wait_until(lambda: place.is_file() and place.read_bytes().count(b"\n") >= 3)
    finished = [json.loads(line)["custom_id"] for line in place.read_bytes().splitlines()]
    assert 3 <= len(finished) < 12
    place.write_bytes(place.read_bytes() + b'{"custom_id": "line-11", "resp')
    with batch_server(tmp_path) as batch_host, client_of(batch_host) as batch_client:
        batch = wait_for(batch_client, name, "completed")
        found = [entry["custom_id"] for entry in results(batch_client, batch.output_file_id)]
        assert sorted(found) == sorted(line["custom_id"] for line in asked)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 12
        again = prompts(batch_host.engine)
        assert len(again) == 12 - len(finished)
        assert not any(f"[user]{done}[assistant]" in again for done in finished)
    with batch_server(tmp_path) as batch_host, client_of(batch_host) as batch_client:
        assert batch_client.batches.retrieve(name).to_dict() == batch.to_dict()
        assert len(results(batch_client, batch.output_file_id)) == 12
        assert batch_host.engine.requests == []


@pytest.mark.parametrize("step", ["publish", "write_json"])
def test_a_crash_while_results_become_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Stop before and after the results get their new name; the next start must not lose them."""
    with batch_server(tmp_path) as batch_host, client_of(batch_host) as batch_client:
        crashed = threading.Event()
        real = getattr(file_store, step)

        def crash(path: Path, *rest: Any) -> None:
            if "batches" in str(path) or (crashing and path.suffix == ".json"):
                crashed.set()
                raise OSError(errno.EIO, "crash")
            real(path, *rest)

        name = upload(batch_client, [request_line("a")])
        crashing = True
        monkeypatch.setattr(file_store, step, crash)
        batch = batch_client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
        assert crashed.wait(10)
        assert batch_client.batches.retrieve(batch.id).status == "finalizing"
    monkeypatch.undo()
    with batch_server(tmp_path) as batch_host, client_of(batch_host) as batch_client:
        done = wait_for(batch_client, batch.id, "completed")
        assert [entry["custom_id"] for entry in results(batch_client, done.output_file_id)] == ["a"]
        assert batch_host.engine.requests == []


def test_servers_share_a_folder(tmp_path: Path) -> None:
    """What one takes in the other one shows, cancels, and goes on with when the first one is gone."""
    with (
        batch_server(tmp_path, batch_concurrency=2) as second,
        client_of(second) as other,
        batch_server(tmp_path, start=False) as first,
        client_of(first) as batch_client,
    ):
        first.engine.delay = second.engine.delay = 0.01
        asked = [request_line(f"line-{at:02}", max_tokens=10) for at in range(30)]
        name = begin(batch_client, asked).id
        wait_for(batch_client, name, "in_progress")
        assert first.engine.requests == []
        assert [entry.id for entry in other.batches.list()] == [name]
        cancelled = begin(other, [request_line("x", max_tokens=3000)]).id
        wait_for(batch_client, cancelled, "in_progress")
        batch_client.batches.cancel(cancelled)
        wait_for(other, cancelled, "cancelled")
        assert wait_until(lambda: completed(batch_client, name) > 0)
        asyncio.run_coroutine_threadsafe(runner_of(second).stop(), second.loop).result(10)
        first.call(runner_of(first).start)
        batch = wait_for(other, name, "completed")
        found = [entry["custom_id"] for entry in results(other, batch.output_file_id)]
        assert sorted(found) == [line["custom_id"] for line in asked]
        assert 0 < len(first.engine.requests) < 30
        batch_client.files.delete(batch.output_file_id or "")
        assert batch.output_file_id not in [file.id for file in other.files.list()]


def test_a_folder_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot use /proc/nothing"):
        BatchRunner(Path("/proc/nothing"), nothing, lambda: 1, 1, 1 << 20)


async def nothing(*_: object) -> dict[str, Any]:
    return {}


def test_names_never_become_paths(batch_host: Running, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"id": "secret"}')
    (tmp_path / "secret.data").write_text("secret")
    for path in ("files/..%2fsecret", "files/../secret", "files/%2e%2e%2fsecret/content", "batches/..%2f..%2fsecret"):
        answer = httpx.get(f"{batch_host.url}/v1/{path}")
        assert answer.status_code == 404
        assert "secret}" not in answer.text


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    place = tmp_path / "batches" / f"batch_{'0' * 32}"
    place.mkdir(parents=True)
    (place / "batch.json").write_text(content)
    found = BatchRunner(tmp_path, nothing, lambda: 1, 1, 1 << 20)
    assert found.batches.records() == []
    assert "batch.json cannot be read" in caplog.text


def test_old_leftovers_are_removed(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    old, new = files / f"file-{'0' * 32}.data", files / f"file-{'1' * 32}.data"
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (1, 1))
    BatchRunner(tmp_path, nothing, lambda: 1, 1, 1 << 20)
    assert [path.name for path in files.iterdir()] == [new.name]
