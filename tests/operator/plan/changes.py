"""What tests of a change's rollout do with the world of their conftest: change its spec, look at what is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker_operator.plan.actions import Apply, Condition

IN_PLACE = {"maxSurge": 0, "maxUnavailable": 1}
SURGE = {"maxSurge": 1, "maxUnavailable": 0}
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "message": "0/1: 1 Insufficient nvidia.com/gpu."}]


def changed(there: Any) -> Any:
    there.service = replace(there.service, runtime=replace(there.service.runtime, args=("--seed", "1")))
    return there


def written(there: Any, kind: str) -> list[Any]:
    return [a.manifest for a in there.plan().actions if isinstance(a, Apply) and a.manifest["kind"] == kind]


def ready(there: Any) -> Condition:
    found: Condition = next(item for item in there.plan().conditions if item.type == "Ready")
    return found
