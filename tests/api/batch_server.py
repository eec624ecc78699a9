"""A server with a batch folder, and what tests ask it through the `openai` package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from api_server import Running, make_state, serve, wait_until
from calling_server import TEMPLATE, LongEngine
from openai.types import Batch

from stoker_runtime.api.batch.runner import BatchRunner

CHAT = "/v1/chat/completions"
MODEL = "byte-model"


@contextmanager
def batch_server(folder: Path, start: bool = True, **settings: object) -> Iterator[Running]:
    """A server with a batch folder; leaving the block stops it as SIGTERM does."""
    engine = LongEngine()
    state = make_state(engine, TEMPLATE, batch_dir=str(folder), **settings)
    for running in serve(state, engine):
        runner = runner_of(running)
        runner.poll_seconds = 0.02
        if start:
            running.call(runner.start)
        try:
            yield running
        finally:
            asyncio.run_coroutine_threadsafe(runner.stop(), running.loop).result(10)


def runner_of(server: Running) -> BatchRunner:
    assert server.app.batches is not None
    return server.app.batches


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
