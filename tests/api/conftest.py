"""One server for all tests of the API; each test gets it with its engine as new."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import openai
from api_server import Running, make_state, serve
from batch_server import batch_server, client_of
from calling_server import CALLS, TEMPLATE, LongEngine, says
from fake_engine import FakeEngine
from server_process import ServerProcess

from stoker_runtime.api.answering.state import Phase


@pytest.fixture
def processes() -> Iterator[list[ServerProcess]]:
    """A list for servers that a test starts; they are closed after it."""
    started: list[ServerProcess] = []
    yield started
    for process in started:
        process.close()


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    engine = FakeEngine()
    yield from serve(make_state(engine), engine)


@pytest.fixture
def server(running: Running) -> Iterator[Running]:
    """The shared server, with its engine as new."""
    running.engine.reset()
    yield running
    running.engine.reset()
    running.state.phase = Phase.READY


@pytest.fixture(scope="session")
def http_pool(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=10, verify=False) as client:
        yield client


@pytest.fixture
def http(server: Running, http_pool: httpx.Client) -> httpx.Client:
    """A client of the shared server."""
    return http_pool


@pytest.fixture(scope="session")
def calling_running() -> Iterator[Running]:
    engine = LongEngine()
    yield from serve(make_state(engine, TEMPLATE), engine)


@pytest.fixture
def calling(calling_running: Running) -> Iterator[Running]:
    """A server whose model reasons and calls tools, the way of Qwen3; it says CALLS unless told otherwise."""
    calling_running.engine.reset()
    says(calling_running, CALLS)
    yield calling_running
    calling_running.engine.reset()


@pytest.fixture
def batch_host(tmp_path: Path) -> Iterator[Running]:
    """A server with a batch folder of its own."""
    with batch_server(tmp_path) as running:
        yield running


@pytest.fixture
def batch_client(batch_host: Running) -> Iterator[openai.OpenAI]:
    with client_of(batch_host) as found:
        yield found
