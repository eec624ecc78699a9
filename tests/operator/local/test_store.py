"""Objects in memory behave as the API server's do, as far as the operator can see."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError
from stoker_operator.local.store import LocalCluster


def manifest(kind: kinds.Kind, name: str, /, owner: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "namespace": "default", "labels": {"app": name}}
    if owner:
        meta["ownerReferences"] = [{"uid": owner["metadata"]["uid"]}]
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, **more}


async def test_apply_keeps_what_it_was_not_given() -> None:
    store = LocalCluster()
    live = await store.apply(kinds.DEPLOYMENT, manifest(kinds.DEPLOYMENT, "a", spec={"replicas": 3, "template": 1}))
    live["status"] = {"observedGeneration": 1}
    live["metadata"]["annotations"] = {"theirs": "1"}
    change = manifest(kinds.DEPLOYMENT, "a", spec={"template": 2})
    change["metadata"]["annotations"] = {"ours": "2"}
    after = await store.apply(kinds.DEPLOYMENT, change)
    assert after["spec"] == {"replicas": 3, "template": 2}
    assert after["status"] == {"observedGeneration": 1}
    assert after["metadata"]["annotations"] == {"theirs": "1", "ours": "2"}
    assert after["metadata"]["generation"] == 2
    await store.apply(kinds.DEPLOYMENT, change)
    assert after["metadata"]["generation"] == 2


async def test_readers_get_copies() -> None:
    store = LocalCluster()
    store.add(manifest(kinds.SERVICE, "a", spec={"x": 1}))
    found = await store.get(kinds.SERVICE, "default", "a")
    assert found is not None
    found["spec"]["x"] = 2
    (listed,) = await store.list_all(kinds.SERVICE, "default", "app=a")
    assert listed["spec"] == {"x": 1}
    assert await store.list_all(kinds.SERVICE, "default", "app=b") == []


async def test_deleting_takes_what_is_owned_and_marks_pods() -> None:
    store = LocalCluster()
    job = store.add(manifest(kinds.JOB, "job"))
    pod = store.add(manifest(kinds.POD, "pod", job))
    await store.delete(kinds.JOB, "default", "job", "another uid")
    assert await store.get(kinds.JOB, "default", "job") is not None
    await store.delete(kinds.JOB, "default", "job", job["metadata"]["uid"])
    assert await store.get(kinds.JOB, "default", "job") is None
    assert "deletionTimestamp" in pod["metadata"]
    store.forget(pod)
    assert store.of(kinds.POD) == []


async def test_status_of_nothing_and_a_taken_name_are_refused() -> None:
    store = LocalCluster()
    with pytest.raises(ApiError) as missing:
        await store.apply(kinds.JOB, manifest(kinds.JOB, "a", status={}), subresource="status")
    assert missing.value.status == 404
    await store.create(kinds.JOB, manifest(kinds.JOB, "a"))
    with pytest.raises(ApiError) as taken:
        await store.create(kinds.JOB, manifest(kinds.JOB, "a"))
    assert taken.value.status == 409


async def test_a_change_wakes_whoever_waits() -> None:
    store = LocalCluster()
    waiting = asyncio.create_task(store.changed(30))
    await asyncio.sleep(0)
    store.add(manifest(kinds.JOB, "a"))
    await asyncio.wait_for(waiting, 1)
