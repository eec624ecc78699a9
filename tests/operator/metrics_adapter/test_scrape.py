"""scrape.py: what is read of which pods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from stoker_operator.metrics_adapter.scrape import Scraper

PAGE = """# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 3.0
vllm:num_requests_waiting{engine="1"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
# TYPE vllm:request_success counter
vllm:request_success_total 9.0
"""


class Pods:
    """A cluster that lists these pods and remembers the selectors."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods = list(pods)
        self.selectors: list[str] = []

    async def list_all(self, kind: Any, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        self.selectors.append(selector)
        return self.pods


@pytest.fixture
async def pages() -> AsyncIterator[tuple[int, list[str]]]:
    asked: list[str] = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text=PAGE)

    app = web.Application()
    app.add_routes([web.get("/metrics", page)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1], asked
    await runner.cleanup()


def pod(name: str, port: int, *, ready: bool = True, **meta: Any) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": port}]
    status = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": str(ready)}]}
    metadata = {"name": name, "uid": name} | meta
    return {"metadata": metadata, "spec": {"containers": [{"ports": ports}]}, "status": status}


async def test_only_ready_pods_have_samples(pages: tuple[int, list[str]]) -> None:
    port, asked = pages
    cluster = Pods(pod("a", port), pod("b", port, ready=False), pod("c", port, deletionTimestamp="t"), pod("closed", 1))
    scraper = Scraper(cluster, 2.0)  # type: ignore[arg-type]
    found = await scraper.samples("ns", "app=x", "*", "vllm:num_requests_waiting")
    assert [(name, value) for name, value, _ in found] == [("a", 7.0)]
    assert cluster.selectors[0].endswith("app.kubernetes.io/component=engine,app=x")
    assert [v for _, v, _ in await scraper.samples("ns", "", "a", "vllm:kv_cache_usage_perc")] == [0.75]
    assert len(asked) == 1  # one page serves every series for a while
    assert await scraper.samples("ns", "", "nobody", "vllm:num_requests_waiting") == []
