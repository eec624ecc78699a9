"""node_cache/agent.py: a look that hangs is said, one that fails is none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.node_cache import agent as agents
from stoker_operator.node_cache.agent import Agent
from stoker_operator.node_cache.disk import Disk
from stoker_operator.node_cache.settings import from_arguments


class Hanging(Cluster):
    """Its answer is awaited for as long as a test likes, then is an error."""

    def __init__(self) -> None:
        super().__init__(None, 1)
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def get(self, *_: Any) -> Any:
        self.asked.set()
        await self.answer.wait()
        raise ApiError(503, "ServiceUnavailable", "not now")


async def test_a_look_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "HANGING_SECONDS", 0.2)
    cluster = Hanging()
    agent = Agent(cluster, from_arguments(["--node", "n1", "--folder", str(tmp_path)], {}), Disk(tmp_path, 0))
    assert not agent.hangs()
    running = asyncio.create_task(agent.run())
    try:
        await asyncio.wait_for(cluster.asked.wait(), 10)
        assert not agent.hangs()
        await asyncio.sleep(0.3)
        assert agent.hangs()
        cluster.answer.set()
        await asyncio.sleep(0.3)
        assert not agent.hangs()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
