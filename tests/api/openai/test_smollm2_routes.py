"""The translated routes and batches with a real model: `stoker serve` with SmolLM2, killed and started again."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from api_server import wait_until
from server_process import ServerProcess
from tests import real_models

QUESTION: Any = [{"role": "user", "content": "Name the capital of France."}]
ANSWER = "The capital of France is Paris."
MODEL = "smollm2"


def start(folder: Path, *more: str) -> ServerProcess:
    model = real_models.smollm2()
    program = [sys.executable, "-m", "stoker_cli", "serve", str(model)]
    flags = ["--served-model-name", MODEL, "--max-model-len", "512", "--device", "cpu", "--batch-dir", str(folder)]
    return ServerProcess(program, *flags, "--batch-concurrency", "2", *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    process = start(folder)
    try:
        yield process.wait_ready(120)
    finally:
        process.close()


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)


def test_responses(server: ServerProcess) -> None:
    with client_of(server) as client:
        first = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
        assert (first.output_text, first.status) == (ANSWER, "completed")
        with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
            streamed = stream.get_final_response()
        assert streamed.output_text == ANSWER
        assert streamed.usage is not None
        assert first.usage is not None
        assert streamed.usage.output_tokens == first.usage.output_tokens
        assert streamed.usage.input_tokens_details.cached_tokens == 32
        again = client.responses.create(
            model=MODEL, input="And again?", temperature=0, previous_response_id=first.id, max_output_tokens=4
        )
        assert again.usage is not None
        assert again.usage.input_tokens > first.usage.total_tokens


def test_messages(server: ServerProcess) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        options: Any = {"model": MODEL, "max_tokens": 64, "messages": QUESTION, "extra_body": {"temperature": 0}}
        message = client.messages.create(**options)
        assert [block.text for block in message.content] == [ANSWER]  # type: ignore[union-attr]
        assert message.stop_reason == "end_turn"
        with client.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == ANSWER
        counted = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
        assert counted == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_batch_survives_that_the_server_is_killed(server: ServerProcess, folder: Path) -> None:
    """The last test of this file: it kills the server. The next one has two API processes, and either may go on."""
    lines = [
        {
            "custom_id": f"line-{at}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 64},
        }
        for at in range(8)
    ]
    with client_of(server) as client:
        content = "\n".join(json.dumps(line) for line in lines).encode()
        file = client.files.create(file=content, purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        place = folder / "batches" / batch.id / "output.jsonl"
        assert wait_until(lambda: place.is_file() and place.read_bytes().count(b"\n") >= 2, 60)
        server.signal(signal.SIGKILL)
        server.exit_status()
    finished = place.read_bytes().splitlines()
    assert 2 <= len(finished) < 8
    second = start(folder, "--api-server-count", "2")
    try:
        second.wait_ready(120)
        with client_of(second) as client:
            assert wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
            batch = client.batches.retrieve(batch.id)
            assert batch.output_file_id is not None
            entries = client.files.content(batch.output_file_id).read().splitlines()
        assert entries[: len(finished)] == finished
        found = [json.loads(entry) for entry in entries]
        assert sorted(entry["custom_id"] for entry in found) == [line["custom_id"] for line in lines]
        texts = {entry["response"]["body"]["choices"][0]["message"]["content"] for entry in found}
        assert texts == {ANSWER}
    finally:
        second.close()
