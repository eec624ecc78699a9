"""retention.py: a retained volume on a real API server, from its last use to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.apply.retention import sweep
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.plan.retention import UNUSED_SINCE
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

Build = Callable[..., InferenceService]


@pytest.mark.apiserver
async def test_a_retained_volume_outlives_its_service_and_then_goes(
    cluster: Cluster, namespace: str, service: Build, create: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    body = await create("demo", cache={"retain": "1h"})
    built = replace(
        service(cache={"retain": "1h"}), namespace=namespace, uid=body["metadata"]["uid"], name=body["metadata"]["name"]
    )
    made = await cluster.apply(kinds.CLAIM, manifests.volume_claim(built, Settings()))
    name = made["metadata"]["name"]
    start = datetime.now(UTC)

    await sweep(cluster, namespace, start + timedelta(days=9), without=[namespace])
    untouched = await cluster.get(kinds.CLAIM, namespace, name)
    assert untouched is not None, "a volume of an excluded namespace was ended"

    async def note(later: float) -> str | None:
        await sweep(cluster, namespace, start + timedelta(seconds=later))
        found = await cluster.get(kinds.CLAIM, namespace, name)
        return found["metadata"]["annotations"].get(UNUSED_SINCE, "") if found else None

    assert await note(0) == ""
    await cluster.delete(kinds.INFERENCE_SERVICE, namespace, "demo", body["metadata"]["uid"])
    since = await note(10)
    assert since
    assert await note(3000) == since
    await create("second", cache={"retain": "1h"})  # the same source: it finds the weights in place
    assert await note(3700) == ""
    assert await note(3700) == ""
    second = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "second")
    assert second is not None
    await cluster.delete(kinds.INFERENCE_SERVICE, namespace, "second", second["metadata"]["uid"])
    assert await note(4000)

    async def gone() -> bool:
        return await note(7700) is None

    await eventually(gone)
