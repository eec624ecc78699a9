"""Adapters through the engine process: loaded by one client, served to all, refused without a trace."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker_runtime.config import EngineConfig, LoraModule
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.errors import ConfigError, NotFoundError, RequestError, UnsupportedError
from stoker_runtime.request import FinishReason, Request, SamplingParams

COMMAND = [sys.executable, str(Path(__file__).parent / "uniform_core.py")]
CONFIG = EngineConfig(model="uniform", enable_lora=True, lora_modules=(LoraModule("ada", "/ada", "base"),))


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


async def finish(engine: AsyncEngine, adapter: int) -> FinishReason | None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    stream = engine.submit([Request(f"r{adapter}", (1, 2, 3), params, time.monotonic(), adapter=adapter)])
    while True:
        for output in await stream.next():
            if output.finish is not None:
                return output.finish


async def test_what_one_client_loads_all_are_told_of() -> None:
    async with await AsyncEngine.start(CONFIG, command=[*COMMAND, "adapters"], log_level="error") as first:
        assert first.adapters["ada"].parent == "base"
        async with await AsyncEngine.attach(first.endpoints[0]) as second:
            assert second.adapters == first.adapters, "known before the first request"
            await second.load_adapter("bo", "/bo", parent="other")
            assert (second.adapters["bo"].path, second.adapters["bo"].parent) == ("/bo", "other")
            await until(lambda: "bo" in first.adapters)
            assert await finish(first, first.adapters["bo"].number) is FinishReason.LENGTH
            before = dict(first.adapters)
            for name, path, says in (("cy", "bad one", "it is bad"), ("ada", "/x", "already been loaded")):
                with pytest.raises(RequestError, match=says):
                    await first.load_adapter(name, path)
            assert first.adapters == before
            number = second.adapters["bo"].number
            await second.unload_adapter("bo")
            assert "bo" not in second.adapters
            with pytest.raises(NotFoundError, match="cannot be found"):
                await second.unload_adapter("bo")
            with pytest.raises(NotFoundError, match="was unloaded"):
                await finish(first, number)
            assert await finish(first, first.adapters["ada"].number) is FinishReason.LENGTH
            assert await finish(first, 0) is FinishReason.LENGTH


async def test_an_engine_without_adapters_says_so() -> None:
    config = EngineConfig(model="uniform")
    async with await AsyncEngine.start(config, command=[*COMMAND, "ok"], log_level="error") as engine:
        with pytest.raises(UnsupportedError, match="--enable-lora"):
            await engine.load_adapter("ada", "/ada")
        assert engine.adapters == {}


async def test_a_bad_adapter_of_the_configuration_ends_the_start() -> None:
    config = EngineConfig(model="uniform", enable_lora=True, lora_modules=(LoraModule("ada", "bad folder"),))
    with pytest.raises(ConfigError, match="lora_modules, ada: bad folder: it is bad"):
        await AsyncEngine.start(config, command=[*COMMAND, "adapters"], log_level="error")
