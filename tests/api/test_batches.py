"""Files and batches through the `openai` package: results, restarts, cancels, deadlines, full disks, broken lines."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_server import Running, make_state, serve, wait_until
from calling_server import TEMPLATE, LongEngine
from openai.types import Batch
from pooling_engine import PoolingEngine, make_pooling_state

from stoker_runtime.api.batch import file_store, lines
from stoker_runtime.api.batch.lines import ResultFile
from stoker_runtime.api.batch.runner import BatchRunner
from stoker_runtime.api.sampling import Limits
from stoker_runtime.api.state import ServerState
from stoker_runtime.errors import ConfigError, StorageError
from stoker_runtime.models.pooling import Pooling, PoolingSpec, Task

CHAT = "/v1/chat/completions"
MODEL = "byte-model"


@contextmanager
def batch_server(folder: Path, start: bool = True, **settings: object) -> Iterator[Running]:
    """A server with a batch folder; leaving the block stops it as SIGTERM does."""
    engine = LongEngine()
    state = make_state(engine, TEMPLATE, batch_dir=str(folder), **settings)
    for running in serve(state, engine):
        runner = runner_of(state)
        runner.poll_seconds = 0.02
        if start:
            running.call(runner.start)
        try:
            yield running
        finally:
            asyncio.run_coroutine_threadsafe(runner.stop(), running.loop).result(10)


def runner_of(state: ServerState) -> BatchRunner:
    assert state.batches is not None
    return state.batches


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with batch_server(tmp_path) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with client_of(server) as found:
        yield found


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def request_line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": custom_id}]} if url == CHAT else {}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": MODEL, **content, "max_tokens": 4, **body},
    }


def upload(client: openai.OpenAI, requests: list[dict[str, Any]]) -> str:
    content = "\n".join(json.dumps(line) for line in requests).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def begin(client: openai.OpenAI, requests: list[dict[str, Any]], endpoint: Any = CHAT) -> Batch:
    name = upload(client, requests)
    return client.batches.create(input_file_id=name, endpoint=endpoint, completion_window="24h")


def wait_for(client: openai.OpenAI, name: str, *statuses: str) -> Batch:
    assert wait_until(lambda: client.batches.retrieve(name).status in statuses, 20), client.batches.retrieve(name)
    return client.batches.retrieve(name)


def completed(client: openai.OpenAI, name: str) -> int:
    counts = client.batches.retrieve(name).request_counts
    return counts.completed if counts else 0


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def prompts(engine: LongEngine) -> list[str]:
    return [bytes(request.prompt_token_ids).decode() for request in engine.requests]


def test_files(client: openai.OpenAI) -> None:
    content = b'{"custom_id": "a"}\n' * 100_000
    made = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(content), "in.jsonl", "batch", "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    more = [client.files.create(file=b"x", purpose="batch").id for _ in range(2)]
    assert [file.id for file in client.files.list(order="asc", limit=2)] == [made.id, *more]
    assert client.files.list(purpose="batch_output").data == []
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


def test_a_batch_from_lines_to_results(client: openai.OpenAI) -> None:
    asked = [request_line("a"), request_line("b", max_tokens=6), request_line("c", temperature=-1)]
    batch = begin(client, asked)
    assert batch.status == "validating"
    batch = wait_for(client, batch.id, "completed")
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    found = {entry["custom_id"]: entry for entry in results(client, batch.output_file_id)}
    assert set(found) == {"a", "b"}
    assert found["b"]["response"]["status_code"] == 200
    assert found["b"]["response"]["body"]["choices"][0]["message"]["content"] == "The qu"
    assert found["a"]["id"] != found["b"]["id"]
    (wrong,) = results(client, batch.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("c", 400)
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    assert batch.in_progress_at is not None
    assert batch.completed_at is not None
    assert [file.purpose for file in client.files.list(order="asc")] == ["batch", "batch_output", "batch_output"]
    assert [entry.id for entry in client.batches.list()] == [batch.id]


@pytest.mark.parametrize(
    ("endpoint", "body", "read"),
    [
        ("/v1/completions", {"prompt": "x"}, lambda body: body["choices"][0]["text"]),
        (
            "/v1/responses",
            {"input": "x", "max_tokens": None, "max_output_tokens": 4},
            lambda body: body["output"][0]["content"][0]["text"],
        ),
    ],
)
def test_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any], read: Callable[[Any], str]) -> None:
    line = request_line("a", endpoint, **body)
    line["body"] = {name: value for name, value in line["body"].items() if value is not None}
    batch = wait_for(client, begin(client, [line], endpoint).id, "completed")
    (found,) = results(client, batch.output_file_id)
    assert read(found["response"]["body"]) == "The "


def test_embeddings(tmp_path: Path) -> None:
    engine = PoolingEngine()
    state = make_pooling_state(engine, PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=True), batch_dir=str(tmp_path))
    for running in serve(state, engine):
        running.call(runner_of(state).start)
        url = "/v1/embeddings"
        asked = [{"custom_id": "a", "method": "POST", "url": url, "body": {"model": MODEL, "input": ["abc"]}}]
        with client_of(running) as client:
            batch = wait_for(client, begin(client, asked, url).id, "completed")
            (found,) = results(client, batch.output_file_id)
            wrong = wait_for(client, begin(client, [request_line("a")]).id, "completed")
            (refused,) = results(client, wrong.error_file_id)
        assert len(found["response"]["body"]["data"][0]["embedding"]) == 4
        assert refused["response"]["body"]["error"]["code"] == "model_does_not_generate"
        asyncio.run_coroutine_threadsafe(runner_of(state).stop(), running.loop).result(10)


def test_lines_are_checked_before_any_runs(server: Running, client: openai.OpenAI) -> None:
    good = json.dumps(request_line("a"))
    content = "\n".join(
        [
            good,
            "",
            '{"custom_id": ',
            json.dumps(request_line("a")),
            json.dumps({**request_line("b"), "url": "/v1/completions"}),
            json.dumps({**request_line("c"), "method": "GET"}),
            json.dumps({**request_line("d"), "body": []}),
            "[1]",
            "[" * 100_000,
        ]
    )
    name = client.files.create(file=content.encode() + b"\n\xff\xfe\n", purpose="batch").id
    batch = client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
    batch = wait_for(client, batch.id, "failed")
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or ()] == [
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "mismatched_endpoint"),
        (6, "invalid_method"),
        (7, "missing_required_parameter"),
        (8, "invalid_json_line"),
        (9, "invalid_json_line"),
        (10, "invalid_json_line"),
    ]
    assert server.engine.requests == []
    empty = client.files.create(file=b"\n\n", purpose="batch").id
    batch = client.batches.create(input_file_id=empty, endpoint=CHAT, completion_window="24h")
    errors = wait_for(client, batch.id, "failed").errors
    assert errors is not None
    assert [error.code for error in errors.data or ()] == ["empty_file"]


def test_a_restart_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    asked = [request_line(f"line-{at}") for at in range(12)]
    with batch_server(tmp_path, batch_concurrency=2) as server, client_of(server) as client:
        server.engine.delay = 0.02
        name = begin(client, asked).id
        place = tmp_path / "batches" / name / "output.jsonl"
        assert wait_until(lambda: place.is_file() and place.read_bytes().count(b"\n") >= 3)
    finished = [json.loads(line)["custom_id"] for line in place.read_bytes().splitlines()]
    assert 3 <= len(finished) < 12
    place.write_bytes(place.read_bytes() + b'{"custom_id": "line-11", "resp')
    with batch_server(tmp_path) as server, client_of(server) as client:
        batch = wait_for(client, name, "completed")
        found = [entry["custom_id"] for entry in results(client, batch.output_file_id)]
        assert sorted(found) == sorted(line["custom_id"] for line in asked)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 12
        again = prompts(server.engine)
        assert len(again) == 12 - len(finished)
        assert not any(f"[user]{done}[assistant]" in again for done in finished)
    with batch_server(tmp_path) as server, client_of(server) as client:
        assert client.batches.retrieve(name).to_dict() == batch.to_dict()
        assert len(results(client, batch.output_file_id)) == 12
        assert server.engine.requests == []


@pytest.mark.parametrize("step", ["publish", "write_json"])
def test_a_crash_while_results_become_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Stop before and after the results get their new name; the next start must not lose them."""
    with batch_server(tmp_path) as server, client_of(server) as client:
        crashed = threading.Event()
        real = getattr(file_store, step)

        def crash(path: Path, *rest: Any) -> None:
            if "batches" in str(path) or (crashing and path.suffix == ".json"):
                crashed.set()
                raise OSError(errno.EIO, "crash")
            real(path, *rest)

        name = upload(client, [request_line("a")])
        crashing = True
        monkeypatch.setattr(file_store, step, crash)
        batch = client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
        assert crashed.wait(10)
        assert client.batches.retrieve(batch.id).status == "finalizing"
    monkeypatch.undo()
    with batch_server(tmp_path) as server, client_of(server) as client:
        done = wait_for(client, batch.id, "completed")
        assert [entry["custom_id"] for entry in results(client, done.output_file_id)] == ["a"]
        assert server.engine.requests == []


def test_cancel(server: Running, client: openai.OpenAI) -> None:
    server.engine.delay = 0.02
    asked = [request_line(f"line-{at}", max_tokens=4 if at < 3 else 2000) for at in range(200)]
    batch = begin(client, asked)
    assert wait_until(lambda: completed(client, batch.id) == 3)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = wait_for(client, batch.id, "cancelled")
    assert len(results(client, batch.output_file_id)) == 3
    assert wait_until(lambda: not server.state.active)
    assert batch.cancelled_at is not None
    with pytest.raises(openai.BadRequestError, match="status 'cancelled'"):
        client.batches.cancel(batch.id)


def test_a_deadline_that_has_passed(tmp_path: Path) -> None:
    with batch_server(tmp_path, start=False) as server, client_of(server) as client:
        name = begin(client, [request_line("a"), request_line("b")]).id
        store = runner_of(server.state).batches
        store.save({**store.get(name), "expires_at": 1})
        server.engine.delay = 5
        server.call(runner_of(server.state).start)
        batch = wait_for(client, name, "expired")
        found = results(client, batch.error_file_id)
        assert [entry["custom_id"] for entry in found] == ["a", "b"]
        assert {entry["error"]["code"] for entry in found} == {"batch_expired"}
        assert batch.output_file_id is None


def test_a_full_disk_is_waited_for(server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    full = threading.Event()
    full.set()
    runner_of(server.state).retry_seconds = 0.01
    real = ResultFile.append

    def append(self: ResultFile, custom_id: str, result: dict[str, Any]) -> None:
        with lines.storage_errors():
            if full.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
        real(self, custom_id, result)

    monkeypatch.setattr(ResultFile, "append", append)
    name = begin(client, [request_line("a"), request_line("b")]).id
    assert wait_until(lambda: len(server.engine.requests) == 2)
    assert client.batches.retrieve(name).status == "in_progress"
    full.clear()
    batch = wait_for(client, name, "completed")
    assert len(results(client, batch.output_file_id)) == 2
    assert len(server.engine.requests) == 2


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
    assert (tmp_path / "out.jsonl").read_text() == '{"custom_id": "a"}\n'
    assert results.done == {"a"}
    monkeypatch.undo()
    results.append("b", {"custom_id": "b"})
    results.close()
    results.append("c", {"custom_id": "c"})
    assert ResultFile(tmp_path / "out.jsonl").done == {"a", "b"}


def test_an_upload_to_a_full_disk_is_507_and_leaves_nothing(
    server: Running, client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(temporary: Path, final: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_store, "publish", publish)
    with pytest.raises(openai.InternalServerError) as caught:
        client.files.create(file=b"x", purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (507, "disk_full")
    assert list((tmp_path / "files").iterdir()) == []


def test_a_full_queue_is_waited_for(server: Running, client: openai.OpenAI) -> None:
    server.engine.full = True
    name = begin(client, [request_line("a")]).id
    wait_for(client, name, "in_progress")
    threading.Timer(0.3, lambda: setattr(server.engine, "full", False)).start()
    batch = wait_for(client, name, "completed")
    assert batch.error_file_id is None


def test_lines_begin_only_while_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with batch_server(tmp_path) as server, client_of(server) as client:
        waiting = 3
        stats = server.engine.stats

        def busy() -> Any:
            found = stats()
            found.waiting = waiting
            return found

        monkeypatch.setattr(server.engine, "stats", busy)
        name = begin(client, [request_line(f"line-{at}") for at in range(5)]).id
        wait_for(client, name, "in_progress")
        assert server.engine.requests == []
        waiting = 0
        wait_for(client, name, "completed")


def test_lines_come_behind_interactive_requests_where_there_are_priorities(tmp_path: Path) -> None:
    with batch_server(tmp_path) as server, client_of(server) as client:
        service = server.state.service
        assert service is not None
        server.state.service = replace(service, limits=Limits(4096, 512, priorities=True))
        wait_for(client, begin(client, [request_line("a"), request_line("b", priority=-1)]).id, "completed")
        assert sorted(request.priority for request in server.engine.requests) == [-1, 1_000_000]


def test_concurrency_is_bounded(tmp_path: Path) -> None:
    with batch_server(tmp_path, batch_concurrency=3) as server, client_of(server) as client:
        server.engine.delay = 0.01
        name = begin(client, [request_line(f"line-{at}") for at in range(12)]).id
        most = 0
        while client.batches.retrieve(name).status != "completed":
            most = max(most, len(server.state.active))
        assert most == 3


def test_streams_have_no_place_in_a_batch(client: openai.OpenAI) -> None:
    batch = wait_for(client, begin(client, [request_line("a", stream=True)]).id, "completed")
    assert results(client, batch.error_file_id)[0]["response"]["body"]["error"]["param"] == "stream"


def test_what_cannot_be_asked(server: Running, client: openai.OpenAI) -> None:
    name = upload(client, [request_line("a")])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "file-nothing"}, "input_file_id"),
        ({"metadata": {"a": 3}}, "metadata.a"),
    ]
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(
                **{"input_file_id": name, "endpoint": CHAT, "completion_window": "24h", **fields}  # type: ignore[arg-type]
            )
        assert caught.value.param == param
    server.engine.delay = 1
    batch = client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="not finished"):
        client.files.delete(name)
    client.batches.cancel(batch.id)
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_nothing")


def test_forms_that_are_wrong(tmp_path: Path) -> None:
    with batch_server(tmp_path, max_file_bytes=1000) as server:
        url = f"{server.url}/v1/files"
        form = {"content-type": "multipart/form-data; boundary=x"}

        def send(content: bytes, headers: dict[str, str]) -> tuple[int, str]:
            answer = httpx.post(url, content=content, headers=headers)
            return answer.status_code, answer.json()["error"]["message"]

        part = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        assert send(b"{}", {"content-type": "application/json"})[0] == 400
        assert send(b"rubbish", form) == (400, "The body is not a valid multipart form.")
        assert send(part + b"abc", form) == (400, "The form ends before its last boundary.")
        assert send(part + b"a" * 2000, form)[0] == 413
        assert send(part * 2, form)[0] == 400
        purpose = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        assert send(purpose + b"--x--\r\n", form) == (400, "file is required.")
        assert httpx.post(url, files={"file": b"x"}, data={"purpose": "vision"}).json()["error"]["param"] == "purpose"
        assert httpx.post(url, files={"file": b"x"}, data={"a": "b"}).json()["error"]["param"] == "a"
        assert list((tmp_path / "files").iterdir()) == []


def test_without_a_folder_the_routes_say_so(running: Running) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/x")):
        answer = httpx.request(method, running.url + path)
        assert answer.status_code == 501
        assert "--batch-dir" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"


def test_servers_share_a_folder(tmp_path: Path) -> None:
    """What one takes in the other one shows, cancels, and goes on with when the first one is gone."""
    with (
        batch_server(tmp_path, batch_concurrency=2) as second,
        client_of(second) as other,
        batch_server(tmp_path, start=False) as first,
        client_of(first) as client,
    ):
        first.engine.delay = second.engine.delay = 0.01
        asked = [request_line(f"line-{at:02}", max_tokens=10) for at in range(30)]
        name = begin(client, asked).id
        wait_for(client, name, "in_progress")
        assert first.engine.requests == []
        assert [entry.id for entry in other.batches.list()] == [name]
        cancelled = begin(other, [request_line("x", max_tokens=3000)]).id
        wait_for(client, cancelled, "in_progress")
        client.batches.cancel(cancelled)
        wait_for(other, cancelled, "cancelled")
        assert wait_until(lambda: completed(client, name) > 0)
        asyncio.run_coroutine_threadsafe(runner_of(second.state).stop(), second.loop).result(10)
        first.call(runner_of(first.state).start)
        batch = wait_for(other, name, "completed")
        found = [entry["custom_id"] for entry in results(other, batch.output_file_id)]
        assert sorted(found) == [line["custom_id"] for line in asked]
        assert 0 < len(first.engine.requests) < 30
        client.files.delete(batch.output_file_id or "")
        assert batch.output_file_id not in [file.id for file in other.files.list()]


def test_a_folder_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot use /proc/nothing"):
        BatchRunner(Path("/proc/nothing"), nothing, lambda: False, 1)


async def nothing(*_: object) -> dict[str, Any]:
    return {}


def test_names_never_become_paths(server: Running, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"id": "secret"}')
    (tmp_path / "secret.data").write_text("secret")
    for path in ("files/..%2fsecret", "files/../secret", "files/%2e%2e%2fsecret/content", "batches/..%2f..%2fsecret"):
        answer = httpx.get(f"{server.url}/v1/{path}")
        assert answer.status_code == 404
        assert "secret}" not in answer.text


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    place = tmp_path / "batches" / f"batch_{'0' * 32}"
    place.mkdir(parents=True)
    (place / "batch.json").write_text(content)
    found = BatchRunner(tmp_path, nothing, lambda: False, 1)
    assert found.batches.records() == []
    assert "batch.json cannot be read" in caplog.text


def test_old_leftovers_are_removed(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    old, new = files / f"file-{'0' * 32}.data", files / f"file-{'1' * 32}.data"
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (1, 1))
    BatchRunner(tmp_path, nothing, lambda: False, 1)
    assert [path.name for path in files.iterdir()] == [new.name]
