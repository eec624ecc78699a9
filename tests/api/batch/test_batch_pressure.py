"""Batches on a full disk, beside a full queue and beside interactive requests."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import openai
import pytest
from api_server import Running, wait_until
from batch_server import (
    batch_server,
    begin,
    client_of,
    request_line,
    results,
    runner_of,
    wait_for,
)

from stoker_runtime.api.batch import file_store, lines
from stoker_runtime.api.batch.lines import ResultFile
from stoker_runtime.api.generate.sampling import Limits
from stoker_runtime.errors import StorageError


def test_a_full_disk_is_waited_for(
    batch_host: Running, batch_client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    full.set()
    runner_of(batch_host).retry_seconds = 0.01
    real = ResultFile.append

    def append(self: ResultFile, custom_id: str, result: dict[str, Any]) -> None:
        with lines.storage_errors():
            if full.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
        real(self, custom_id, result)

    monkeypatch.setattr(ResultFile, "append", append)
    name = begin(batch_client, [request_line("a"), request_line("b")]).id
    assert wait_until(lambda: len(batch_host.engine.requests) == 2)
    assert batch_client.batches.retrieve(name).status == "in_progress"
    full.clear()
    batch = wait_for(batch_client, name, "completed")
    assert len(results(batch_client, batch.output_file_id)) == 2
    assert len(batch_host.engine.requests) == 2


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that stops half way leaves the file as it was."""
    results = ResultFile(tmp_path / "out.jsonl")
    results.append("a", {"custom_id": "a"})

    def write_half(file: FileIO, data: bytes) -> None:
        file.write(data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lines, "write_all", write_half)
    with pytest.raises(StorageError, match="disk is full"):
        results.append("b", {"custom_id": "b"})
    assert (tmp_path / "out.jsonl").read_text() == '{"custom_id":"a"}\n'
    assert results.done == {"a"}
    monkeypatch.undo()
    results.append("b", {"custom_id": "b"})
    results.close()
    results.append("c", {"custom_id": "c"})
    assert ResultFile(tmp_path / "out.jsonl").done == {"a", "b"}


def test_an_upload_to_a_full_disk_is_507_and_leaves_nothing(
    batch_host: Running, batch_client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(temporary: Path, final: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_store, "publish", publish)
    with pytest.raises(openai.InternalServerError) as caught:
        batch_client.files.create(file=b"x", purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (507, "disk_full")
    assert list((tmp_path / "files").iterdir()) == []


def test_a_full_queue_is_waited_for(batch_host: Running, batch_client: openai.OpenAI) -> None:
    batch_host.engine.full = True
    name = begin(batch_client, [request_line("a")]).id
    wait_for(batch_client, name, "in_progress")
    threading.Timer(0.3, lambda: setattr(batch_host.engine, "full", False)).start()
    batch = wait_for(batch_client, name, "completed")
    assert batch.error_file_id is None


@pytest.mark.parametrize(
    ("waiting", "running", "asleep", "at_once"), [(3, 2, 0, 1), (90, 30, 0, 6), (0, 30, 0, 7), (7, 0, 2, 0)]
)
def test_while_others_wait_lines_have_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: int, running: int, asleep: int, at_once: int
) -> None:
    """Never so many that others notice, nor none at all: a server whose queue is never empty ends its batches too."""
    with batch_server(tmp_path) as batch_host, client_of(batch_host) as batch_client:
        stats = batch_host.engine.stats

        def busy() -> Any:
            found = stats()
            found.waiting, found.running, found.sleep_level = waiting, running, asleep
            return found

        monkeypatch.setattr(batch_host.engine, "stats", busy)
        batch_host.engine.delay = 0.5
        name = begin(batch_client, [request_line(f"line-{at}") for at in range(7)]).id
        wait_for(batch_client, name, "in_progress")
        assert wait_until(lambda: len(batch_host.engine.requests) == at_once)
        assert not wait_until(lambda: len(batch_host.engine.requests) > at_once, 0.3)
        asleep = waiting = 0
        batch_host.engine.delay = 0.0
        wait_for(batch_client, name, "completed")


def test_lines_come_behind_interactive_requests_where_there_are_priorities(tmp_path: Path) -> None:
    with batch_server(tmp_path) as batch_host, client_of(batch_host) as batch_client:
        service = batch_host.state.service
        assert service is not None
        batch_host.state.service = replace(service, limits=Limits(4096, 512, priorities=True))
        wait_for(batch_client, begin(batch_client, [request_line("a"), request_line("b", priority=-1)]).id, "completed")
        assert sorted(request.priority for request in batch_host.engine.requests) == [-1, 1_000_000]


def test_concurrency_is_bounded(tmp_path: Path) -> None:
    with batch_server(tmp_path, batch_concurrency=3) as batch_host, client_of(batch_host) as batch_client:
        batch_host.engine.delay = 0.01
        name = begin(batch_client, [request_line(f"line-{at}") for at in range(12)]).id
        most = 0
        while batch_client.batches.retrieve(name).status != "completed":
            most = max(most, len(batch_host.state.active))
        assert most == 3
