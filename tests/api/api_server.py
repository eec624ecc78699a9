"""A server on loopback with a fake engine and a byte tokenizer, and what tests of it share."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fake_engine import FakeEngine

from stoker_runtime.api.answering.state import Phase, ServerState, Service
from stoker_runtime.api.app import Application
from stoker_runtime.api.generate.sampling import Limits, SamplingDefaults
from stoker_runtime.api.tools.dialect import choose_dialect
from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.metrics import EngineView, ServerMetrics
from stoker_runtime.serve.port import open_port
from stoker_runtime.serve.web import uvicorn_config
from stoker_runtime.text.chat_template import ChatTemplate
from stoker_runtime.text.tokenizer import Tokenizer

# Made once: each client of its own would load the certificates of the system.
CLIENT = httpx.Client(verify=False, timeout=30)
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
KEY = "sk-test-key"


@dataclass
class Running:
    """A server under test. `call` runs a function in its event loop."""

    url: str
    app: Application
    state: ServerState
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], None]) -> None:
        self.loop.call_soon_threadsafe(function)


def make_state(engine: FakeEngine, template: str | None = TEMPLATE, **settings: object) -> ServerState:
    """A server that is ready, with `settings` of ServerConfig."""
    config = ServerConfig(
        EngineConfig("byte-model"),
        served_model_names=("byte-model", "alias"),
        access_log=True,
        **settings,  # type: ignore[arg-type]
    )
    state = ServerState(config, ServerMetrics("byte-model"))
    chat_template = ChatTemplate({"default": template} if template else {}, {}, "test")
    state.service = Service(
        engine,
        Tokenizer.synthetic(512),
        chat_template,
        Limits(engine.max_model_len, engine.vocab_size, priorities=False),
        SamplingDefaults(),
        choose_dialect(config, chat_template),
        names=config.model_names,
    )
    state.metrics.attach([EngineView(engine.stats, page_size=16, num_pages=100)])
    state.phase = Phase.READY
    return state


def serve(state: ServerState, engine: FakeEngine, tls: ssl.SSLContext | None = None) -> Iterator[Running]:
    """Run a server in a thread of its own for as long as the iterator lives."""
    listener = open_port("127.0.0.1", 0)
    app = Application(state)
    server = uvicorn.Server(uvicorn_config(app, tls))
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started, "the server did not start"
    yield Running(url, app, state, engine, loops[0])
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def stream(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; asserts the frame around them."""
    with http.stream("POST", path, json={"model": "byte-model", "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(response.iter_bytes()).decode()
    assert raw.endswith("data: [DONE]\n\n")
    events = raw.split("\n\n")[:-2]
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
