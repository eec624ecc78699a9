"""A leader that falls silent while services change all the time: with the chart's own lease a second one acts within
20 s, what was asked of nobody meanwhile is done, nothing is done twice, and the first one ends once it wakes.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.beside import beside
from tests.operator.reconcile.kubelet import UNSCHEDULED
from tests.operator.test_operator import Start, holder, restricted, start

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.settings import Settings

__all__ = ["holder", "restricted", "start"]
pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]
WITHIN_SECONDS = 20
CHANGES_A_SECOND = 20
NAMES = [f"service-{number}" for number in range(7)]


async def change(cluster: Cluster, namespace: str) -> None:
    """Change one service after the other, many times a second."""
    for number, name in zip(itertools.count(1), itertools.cycle(NAMES)):
        patch = {"spec": {"disruption": {"maxUnavailable": 1 + number % 9}}}
        await cluster.merge(kinds.INFERENCE_SERVICE, namespace, name, patch)
        await asyncio.sleep(1 / CHANGES_A_SECOND)


async def test_a_second_one_acts_and_nothing_is_done_twice(
    start: Start,
    holder: Callable[[], Any],
    create: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    eventually: Callable[..., Any],
) -> None:
    lease = f"--lease-seconds={Settings().lease_seconds:.0f}"
    operators = {name: start(name, lease) for name in ("one", "two")}
    leader = await eventually(holder, 60)
    for name in NAMES:
        await create(name, placement=UNSCHEDULED)

    async def begun() -> bool:
        return len(await cluster.list_all(kinds.JOB, namespace)) == len(NAMES)

    await eventually(begun, 60)
    async with beside(change(cluster, namespace)):
        await asyncio.sleep(1)
        operators[leader].send_signal(signal.SIGSTOP)
        lost = time.monotonic()
        await cluster.delete(kinds.SERVICE, namespace, NAMES[0], await uid_of(cluster, namespace, NAMES[0]))
        await eventually(lambda: cluster.get(kinds.SERVICE, namespace, NAMES[0]), 60)
        took = time.monotonic() - lost
        operators[leader].send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(operators[leader].wait, 30) == 1, "it went on beside the one that leads"
    assert took < WITHIN_SECONDS, f"a second one acted after {took:.1f} s"
    assert await holder() != leader

    async def settled() -> bool:
        found = await cluster.list_all(kinds.INFERENCE_SERVICE, namespace)
        return all(item["status"]["observedGeneration"] == item["metadata"]["generation"] for item in found)

    await eventually(settled, 60)
    for name in NAMES:
        service = await cluster.get(kinds.INFERENCE_SERVICE, namespace, name)
        budget = await cluster.get(kinds.DISRUPTION_BUDGET, namespace, name)
        assert service is not None
        assert budget is not None
        assert budget["spec"]["maxUnavailable"] == service["spec"]["disruption"]["maxUnavailable"]
        ours = f"app.kubernetes.io/managed-by=stoker,app.kubernetes.io/instance={name}"
        assert len(await cluster.list_all(kinds.JOB, namespace, ours)) == 1, "a model was fetched twice"
    told = Counter(
        (event["involvedObject"]["name"], event["message"])
        for event in await cluster.list_all(kinds.EVENT, namespace)
        if event.get("reportingComponent") == "stoker.dev/operator" and event["message"].startswith("Created")
    )
    again = {what for what, times in told.items() if times > 1}
    assert {name for name, _ in again} <= {NAMES[0]}, f"made twice: {again}"  # its Service was deleted once


async def uid_of(cluster: Cluster, namespace: str, name: str) -> str:
    """Of a Service."""
    found = await cluster.get(kinds.SERVICE, namespace, name)
    assert found is not None
    return str(found["metadata"]["uid"])
