"""retention.py: which volumes outlive their last use, for how long, and on a real API server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.cluster import api as kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.plan.retention import UNUSED_SINCE, End, Note, claims_in_use, plan_retention, sweep
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

Build = Callable[..., InferenceService]
Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def claim(service: Build, since: str = "", **cache: Any) -> Object:
    found = manifests.volume_claim(service(cache={"retain": "1h"} | cache), Settings())
    if since:
        found["metadata"]["annotations"][UNUSED_SINCE] = since
    return found


CASES: dict[str, tuple[Object, bool, list[tuple[type, str]]]] = {
    # name: (the claim, whether it is used, what is done)
    "used": ({}, True, []),
    "unused now": ({}, False, [(Note, "2026-01-01T12:00:00Z")]),
    "unused for a while": ({"since": "2026-01-01T11:00:01Z"}, False, []),
    "unused for long": ({"since": "2026-01-01T11:00:00Z"}, False, [(End, "")]),
    "used again": ({"since": "2026-01-01T11:00:00Z"}, True, [(Note, "")]),
    "not to be retained": ({"retain": "0s"}, False, []),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_done_about_a_claim(service: Build, case: tuple[Object, bool, list[tuple[type, str]]]) -> None:
    options, used, expected = case
    found = claim(service, **options)
    steps = plan_retention([found], {found["metadata"]["name"]} if used else set(), NOW)
    assert [(type(step), getattr(step, "since", "")) for step in steps] == expected


@pytest.mark.parametrize("mark", [{"ownerReferences": [{"uid": "x"}]}, {"deletionTimestamp": "t"}], ids=str)
def test_what_kubernetes_ends_is_left_to_it(service: Build, mark: Object) -> None:
    found = claim(service, since="2020-01-01T00:00:00Z")
    found["metadata"] |= mark
    assert plan_retention([found], set(), NOW) == []


def test_what_is_used(raw: Callable[..., Object]) -> None:
    built = raw("demo") | {"status": {"cache": {"claim": "old"}}}
    broken = raw("broken", model={"uri": "no"}) | {"status": {"cache": {"claim": "kept"}}}
    going = raw("going", model={"uri": "hf://a/b"})
    going["metadata"]["deletionTimestamp"] = "t"

    def mounting(name: str) -> Object:
        return {"volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": name}}, {"name": "tmp"}]}

    deployment = {"spec": {"template": {"spec": mounting("rolled-back")}}}
    pods = [{"spec": mounting("terminating"), "status": {}}, {"spec": mounting("done"), "status": {"phase": "Failed"}}]
    used = claims_in_use([built, broken, going], [deployment], pods)
    assert used - {""} == {"old", "kept", "rolled-back", "terminating"} | {
        name for name in used if name.startswith("models-")
    }
    assert sum(name.startswith("models-") for name in used) == 1


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
