"""Files and batches through the `openai` package: results, cancels, deadlines, broken lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_server import Running, serve, wait_until
from batch_server import (
    CHAT,
    MODEL,
    batch_server,
    begin,
    client_of,
    completed,
    request_line,
    results,
    runner_of,
    upload,
    wait_for,
)
from pooling_engine import PoolingEngine, make_pooling_state

from stoker_runtime.models.pooling import Pooling, PoolingSpec, Task


def test_files(batch_client: openai.OpenAI) -> None:
    content = b'{"custom_id": "a"}\n' * 100_000
    made = batch_client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(content), "in.jsonl", "batch", "processed")
    assert batch_client.files.retrieve(made.id) == made
    assert batch_client.files.content(made.id).read() == content
    more = [batch_client.files.create(file=b"x", purpose="batch").id for _ in range(2)]
    assert [file.id for file in batch_client.files.list(order="asc", limit=2)] == [made.id, *more]
    assert batch_client.files.list(purpose="batch_output").data == []
    assert batch_client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        batch_client.files.content(made.id)


def test_a_batch_from_lines_to_results(batch_client: openai.OpenAI) -> None:
    asked = [request_line("a"), request_line("b", max_tokens=6), request_line("c", temperature=-1)]
    batch = begin(batch_client, asked)
    assert batch.status == "validating"
    batch = wait_for(batch_client, batch.id, "completed")
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    found = {entry["custom_id"]: entry for entry in results(batch_client, batch.output_file_id)}
    assert set(found) == {"a", "b"}
    assert found["b"]["response"]["status_code"] == 200
    assert found["b"]["response"]["body"]["choices"][0]["message"]["content"] == "The qu"
    assert found["a"]["id"] != found["b"]["id"]
    (wrong,) = results(batch_client, batch.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("c", 400)
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    assert batch.in_progress_at is not None
    assert batch.completed_at is not None
    assert [file.purpose for file in batch_client.files.list(order="asc")] == ["batch", "batch_output", "batch_output"]
    assert [entry.id for entry in batch_client.batches.list()] == [batch.id]


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
def test_endpoints(
    batch_client: openai.OpenAI, endpoint: str, body: dict[str, Any], read: Callable[[Any], str]
) -> None:
    line = request_line("a", endpoint, **body)
    line["body"] = {name: value for name, value in line["body"].items() if value is not None}
    batch = wait_for(batch_client, begin(batch_client, [line], endpoint).id, "completed")
    (found,) = results(batch_client, batch.output_file_id)
    assert read(found["response"]["body"]) == "The "


def test_embeddings(tmp_path: Path) -> None:
    engine = PoolingEngine()
    state = make_pooling_state(engine, PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=True), batch_dir=str(tmp_path))
    for running in serve(state, engine):
        running.call(runner_of(running).start)
        url = "/v1/embeddings"
        asked = [{"custom_id": "a", "method": "POST", "url": url, "body": {"model": MODEL, "input": ["abc"]}}]
        with client_of(running) as batch_client:
            batch = wait_for(batch_client, begin(batch_client, asked, url).id, "completed")
            (found,) = results(batch_client, batch.output_file_id)
            wrong = wait_for(batch_client, begin(batch_client, [request_line("a")]).id, "completed")
            (refused,) = results(batch_client, wrong.error_file_id)
        assert len(found["response"]["body"]["data"][0]["embedding"]) == 4
        assert refused["response"]["body"]["error"]["code"] == "model_does_not_generate"
        asyncio.run_coroutine_threadsafe(runner_of(running).stop(), running.loop).result(10)


REST = b'"endpoint": "", "input_file_id": "", "expires_at": 1, "request_counts": {}}'


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff",
        b"[]",
        b'{"id": "%b"}',
        b'{"id": "batch_other", "status": "validating"}',
        b'{"id": "%b", "status": "thinking", ' + REST,
        b'{"id": "%b", "status": "in_progress", "endpoint": "x", "input_file_id": 7, "expires_at": 1}',
        b'{"id": "%b", "status": "finalizing", ' + REST,
    ],
)
def test_one_bad_record_stops_no_other_batch(
    batch_host: Running, batch_client: openai.OpenAI, tmp_path: Path, record: bytes
) -> None:
    """Whoever shares the folder, or edits it, may leave anything there."""
    name = f"batch_{'7' * 32}"
    place = tmp_path / "batches" / name
    place.mkdir()
    (place / "batch.json").write_bytes(record.replace(b"%b", name.encode()))
    (tmp_path / "files" / f"file-{'3' * 32}.json").write_bytes(record)
    assert wait_until(lambda: runner_of(batch_host).looked > 2)
    batch = wait_for(batch_client, begin(batch_client, [request_line("a")]).id, "completed")
    assert batch.id in [each.id for each in batch_client.batches.list()]
    assert batch.output_file_id in [each.id for each in batch_client.files.list()]
    with batch_server(tmp_path):
        """A start finds it there as well."""


def test_a_line_with_more_choices_than_the_queue_holds(tmp_path: Path) -> None:
    """It would be 429 for ever, and hold its slot."""
    with batch_server(tmp_path) as running:
        service = running.state.service
        assert service is not None
        running.state.service = replace(service, limits=replace(service.limits, max_queued=6))
        with client_of(running) as client:
            lines = [request_line("a", n=7), request_line("b", n=6), request_line("c")]
            batch = wait_for(client, begin(client, lines).id, "completed")
            (refused,) = results(client, batch.error_file_id)
            assert refused["custom_id"] == "a"
            assert refused["response"]["status_code"] == 400
            assert refused["response"]["body"]["error"]["param"] == "n"
            assert sorted(each["custom_id"] for each in results(client, batch.output_file_id)) == ["b", "c"]
            with pytest.raises(openai.BadRequestError, match="--max-queued"):
                client.completions.create(model=MODEL, prompt=["a", "b"], n=4)
            with pytest.raises(openai.BadRequestError, match="7 prompts with 1 choices"):
                client.completions.create(model=MODEL, prompt=["a"] * 7)


def test_lines_are_checked_before_any_runs(batch_host: Running, batch_client: openai.OpenAI) -> None:
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
    name = batch_client.files.create(file=content.encode() + b"\n\xff\xfe\n", purpose="batch").id
    batch = batch_client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
    batch = wait_for(batch_client, batch.id, "failed")
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
    assert batch_host.engine.requests == []
    empty = batch_client.files.create(file=b"\n\n", purpose="batch").id
    batch = batch_client.batches.create(input_file_id=empty, endpoint=CHAT, completion_window="24h")
    errors = wait_for(batch_client, batch.id, "failed").errors
    assert errors is not None
    assert [error.code for error in errors.data or ()] == ["empty_file"]


def test_cancel(batch_host: Running, batch_client: openai.OpenAI) -> None:
    batch_host.engine.delay = 0.02
    asked = [request_line(f"line-{at}", max_tokens=4 if at < 3 else 2000) for at in range(200)]
    batch = begin(batch_client, asked)
    assert wait_until(lambda: completed(batch_client, batch.id) == 3)
    assert batch_client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = wait_for(batch_client, batch.id, "cancelled")
    assert len(results(batch_client, batch.output_file_id)) == 3
    assert wait_until(lambda: not batch_host.state.active)
    assert batch.cancelled_at is not None
    with pytest.raises(openai.BadRequestError, match="status 'cancelled'"):
        batch_client.batches.cancel(batch.id)


def test_a_deadline_that_has_passed(tmp_path: Path) -> None:
    with batch_server(tmp_path, start=False) as batch_host, client_of(batch_host) as batch_client:
        name = begin(batch_client, [request_line("a"), request_line("b")]).id
        store = runner_of(batch_host).batches
        store.save({**store.get(name), "expires_at": 1})
        batch_host.engine.delay = 5
        batch_host.call(runner_of(batch_host).start)
        batch = wait_for(batch_client, name, "expired")
        found = results(batch_client, batch.error_file_id)
        assert [entry["custom_id"] for entry in found] == ["a", "b"]
        assert {entry["error"]["code"] for entry in found} == {"batch_expired"}
        assert batch.output_file_id is None


def test_streams_have_no_place_in_a_batch(batch_client: openai.OpenAI) -> None:
    batch = wait_for(batch_client, begin(batch_client, [request_line("a", stream=True)]).id, "completed")
    assert results(batch_client, batch.error_file_id)[0]["response"]["body"]["error"]["param"] == "stream"


def test_what_cannot_be_asked(batch_host: Running, batch_client: openai.OpenAI) -> None:
    name = upload(batch_client, [request_line("a")])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "file-nothing"}, "input_file_id"),
        ({"metadata": {"a": 3}}, "metadata.a"),
    ]
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            batch_client.batches.create(
                **{"input_file_id": name, "endpoint": CHAT, "completion_window": "24h", **fields}  # type: ignore[arg-type]
            )
        assert caught.value.param == param
    batch_host.engine.delay = 1
    batch = batch_client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="not finished"):
        batch_client.files.delete(name)
    batch_client.batches.cancel(batch.id)
    for call in (batch_client.batches.retrieve, batch_client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_nothing")


def test_forms_that_are_wrong(tmp_path: Path) -> None:
    with batch_server(tmp_path, max_file_bytes=1000) as batch_host:
        url = f"{batch_host.url}/v1/files"
        form = {"content-type": "multipart/form-data; boundary=x"}

        def send(content: bytes, headers: dict[str, str]) -> tuple[int, str]:
            answer = httpx.post(url, content=content, headers=headers)
            return answer.status_code, answer.json()["error"]["message"]

        part = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        assert send(b"{}", {"content-type": "application/json"})[0] == 400
        assert send(b"rubbish", form) == (400, "The body is not a valid multipart form: Invalid multipart data.")
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
