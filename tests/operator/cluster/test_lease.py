"""lease.py on a real API server: one holder, take-over after silence, at once after a release."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.kinds import LEASE
from stoker_operator.cluster.lease import Lease

pytestmark = pytest.mark.apiserver


def candidate(cluster: Cluster, namespace: str, name: str) -> Lease:
    return Lease(cluster, namespace, "test", name, 3.0)


async def stored(cluster: Cluster, namespace: str) -> dict[str, Any]:
    found = await cluster.get(LEASE, namespace, "test")
    assert found is not None
    spec: dict[str, Any] = found["spec"]
    return spec


@pytest.fixture
async def leader(cluster: Cluster, namespace: str) -> Lease:
    first = candidate(cluster, namespace, "first")
    await first.acquire()
    return first


async def test_timestamps_are_utc(leader: Lease, cluster: Cluster, namespace: str) -> None:
    spec = await stored(cluster, namespace)
    renewed = datetime.fromisoformat(spec["renewTime"])
    assert renewed.utcoffset() is not None
    assert abs((datetime.now(UTC) - renewed).total_seconds()) < 30
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("first", 1)


async def test_a_lease_that_is_held_is_not_taken(leader: Lease, cluster: Cluster, namespace: str) -> None:
    holding = asyncio.create_task(leader.hold())
    second = asyncio.create_task(candidate(cluster, namespace, "second").acquire())
    await asyncio.sleep(4.5)  # longer than the lease lasts
    assert not second.done()
    for task in (holding, second):
        task.cancel()
    await asyncio.gather(holding, second, return_exceptions=True)
    assert (await stored(cluster, namespace))["holderIdentity"] == "first"


async def test_a_silent_leader_is_replaced(leader: Lease, cluster: Cluster, namespace: str) -> None:
    started = time.monotonic()
    await asyncio.wait_for(candidate(cluster, namespace, "second").acquire(), 15)
    assert time.monotonic() - started >= 3
    assert (await stored(cluster, namespace))["leaseTransitions"] == 2
    await asyncio.wait_for(leader.hold(), 5)  # it notices, and stops


async def test_a_released_lease_is_taken_at_once(leader: Lease, cluster: Cluster, namespace: str) -> None:
    await leader.release()
    started = time.monotonic()
    await asyncio.wait_for(candidate(cluster, namespace, "second").acquire(), 5)
    assert time.monotonic() - started < 1


async def test_nobody_releases_anothers_lease(leader: Lease, cluster: Cluster, namespace: str) -> None:
    await candidate(cluster, namespace, "second").release()
    assert (await stored(cluster, namespace))["holderIdentity"] == "first"
