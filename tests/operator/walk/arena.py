"""What all walks share: one control plane's connection, one mirror of all that the operator made, one server for the
addresses of all pods.

Invariants: walks at the same time have namespaces, nodes and addresses of their own.
Knows nothing of what befalls a service.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from tests.operator.walk.late import LateMirror

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.manifests import workload
from stoker_operator.manifests.fetching import asking
from stoker_operator.manifests.identity import OURS
from stoker_operator.observe.mirror import Mirror
from stoker_operator.observe.observe import CHILDREN
from stoker_operator.process import spare_garbage

# So late watches are at most; 0 = as they are.
LATE_SECONDS = float(os.environ.get("STOKER_WALK_LATE") or "0")
NAMESPACE = kinds.Kind("v1", "Namespace", "namespaces")


@dataclass
class Touch:
    """Told of every object of one namespace that changed: `count` of them, `event` since somebody cleared it."""

    count: int = 0
    event: asyncio.Event = field(default_factory=asyncio.Event)


class Arena:
    """Use `open` to make one and `close` to end it, in the same loop."""

    def __init__(self, cluster: Cluster, runner: web.AppRunner, dead: set[str]) -> None:
        self.cluster, self._runner = cluster, runner
        self.touched: dict[str, Touch] = {}
        self.dead = dead
        told = (cluster, (), self._changed, self._changed)
        self.mirror = LateMirror(*told, longest=LATE_SECONDS) if LATE_SECONDS else Mirror(*told)
        self._patch = pytest.MonkeyPatch()
        self._garbage = gc.get_threshold()
        # As in the operator's process: a third of what a walk computes was to look for cycles.
        spare_garbage()

    @classmethod
    async def open(cls) -> Arena:
        """KUBECONFIG's control plane."""
        dead: set[str] = set()
        runner = await _serve(dead)
        arena = cls(await Cluster.connect(), runner, dead)
        await arena.mirror.get(kinds.INFERENCE_SERVICE, "default", "demo")
        for kind in (*CHILDREN, kinds.CLAIM, kinds.LEADER_WORKER_SET):
            await arena.mirror.list_all(kind, "default", OURS)
        port = runner.addresses[0][1]
        arena._patch.setattr(workload, "PORT", port)
        arena._patch.setattr(asking, "PROGRESS_PORT", port)
        return arena

    async def close(self) -> None:
        """End the watches, the server and the connection."""
        gc.set_threshold(*self._garbage)
        gc.unfreeze()
        self._patch.undo()
        await self.mirror.stop()
        await self._runner.cleanup()
        await self.cluster.close()
        # A TLS connection ends when both sides said so, for which the loop has to live.
        await asyncio.sleep(0.5)

    async def _changed(self, meta: Mapping[str, Any]) -> None:
        touch = self.touched.get(meta["namespace"])
        if touch is not None:
            touch.count += 1
            touch.event.set()


async def _serve(dead: set[str]) -> web.AppRunner:
    """One server for all addresses of this machine's loopback; where a pod is dead, it hangs up."""

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        if request.transport.get_extra_info("sockname")[0] in dead:
            request.transport.abort()
        return web.json_response({"choices": [{"text": "!"}]})

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    return runner
