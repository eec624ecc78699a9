"""retention.py: which volumes outlive their last use, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.plan.retention import UNUSED_SINCE, End, Note, claims_in_use, plan_retention
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
