"""room_for in observe.py: a GPU for which another's pod waits is not to spare."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.observe.nodes import WAITING, Nodes, asking

from stoker_operator.observe.observe import room_for
from stoker_operator.observe.snapshot import Observed

Object = dict[str, Any]
BEFORE = "2026-01-01T00:00:00Z"


def pod(name: str, gpus: int, **more: Any) -> Object:
    meta = {"name": name, "uid": name, "creationTimestamp": more.pop("made", BEFORE)}
    meta |= {"deletionTimestamp": BEFORE} if more.pop("going", False) else {}
    return {"metadata": meta, "spec": asking(gpus) | more, "status": {}}


@pytest.mark.parametrize(
    ("waiting", "spare"),
    [
        ([], True),
        ([pod("other", 1)], False),
        ([pod("other", 2)], True),  # it fits nowhere as things are
        ([pod("own", 1)], True),  # it is the one that is asked about
        ([pod("gated", 1, schedulingGates=[{"name": "queue"}])], True),
        ([pod("going", 1, going=True)], True),
        ([pod("behind", 1, priority=-5)], True),
        ([pod("ahead", 1, priority=5)], False),
        ([pod("nothing", 0)], True),
        ([pod("large", 2), pod("small", 1, made="2026-01-02T00:00:00Z")], False),
    ],
    ids=lambda value: "+".join(each["metadata"]["name"] for each in value) if isinstance(value, list) else "",
)
async def test_a_gpu_that_somebody_waits_for_is_not_to_spare(waiting: list[Object], spare: bool) -> None:
    serving, own = pod("serving", 1), pod("own", 1)
    nodes = Nodes([2, 1], {0: [serving], 1: [pod("others", 1)], WAITING: waiting})
    found = await room_for(nodes, Observed(engine_pods=(serving, own)), [asking(1)])  # type: ignore[arg-type]
    assert found is not None
    assert (found.spare, found.freed) == (spare, True)


async def test_who_waits_gets_the_first_place_and_the_next_is_to_spare() -> None:
    serving = pod("serving", 1)
    nodes = Nodes([2, 1], {0: [serving], WAITING: [pod("other", 1)]})
    found = await room_for(nodes, Observed(engine_pods=(serving,)), [asking(1)])  # type: ignore[arg-type]
    assert found is not None
    assert found.spare
