"""A server over an engine process, by default one whose tokens are random among the legal ones, and a client of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import openai
import uvicorn
from api_server import TEMPLATE, make_state
from fake_engine import FakeEngine

from stoker_runtime.api.app import Application
from stoker_runtime.api.generate.sampling import Limits
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.serve.port import open_port
from stoker_runtime.serve.web import uvicorn_config
from stoker_runtime.text.tokenizer import Tokenizer

CORE = Path(__file__).parent / "constrained_core.py"


@asynccontextmanager
async def constrained_client(template: str = TEMPLATE) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a server that speaks through `template`."""
    config = EngineConfig("shape:tiny")
    async with (
        await AsyncEngine.start(config, command=[sys.executable, str(CORE)], log_level="error") as engine,
        client_of(engine, Tokenizer.load("shape:tiny"), template) as found,
    ):
        yield found


@asynccontextmanager
async def client_of(
    engine: AsyncEngine, tokenizer: Tokenizer, template: str = TEMPLATE
) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a server over `engine`."""
    state = make_state(FakeEngine(), template)
    service = state.service
    assert service is not None
    limits = Limits(engine.max_model_len, engine.vocab_size, False, engine.ready.eos_token_ids)
    state.service = replace(service, engine=engine, tokenizer=tokenizer, limits=limits)
    listener = open_port("127.0.0.1", 0)
    web = uvicorn.Server(uvicorn_config(Application(state)))
    serving = asyncio.create_task(web.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as found:
        yield found
    web.should_exit = True
    await serving
