"""turn.py: what nobody asked of a service waits for its turn, what its owner asked does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker_operator.plan.actions import Apply
from stoker_operator.settings import Settings

NEWER = Settings(runtime_image="registry/engine:77")


def serving(world: Any, **spec: Any) -> Any:
    """A service that serves, as it was noted, of which the default image is then another one."""
    there = world(**spec).pod().answered()
    there.service = replace(there.service, status=there.status() | {"observedGeneration": 1})
    assert there.plan().actions == ()
    there.settings = NEWER
    return there


def deployments(there: Any) -> list[Apply]:
    return [a for a in there.plan().actions if isinstance(a, Apply) and a.manifest["kind"] == "Deployment"]


def condition(there: Any, kind: str) -> Any:
    return next(item for item in there.plan().conditions if item.type == kind)


def test_a_new_default_image_asks_waits_and_says_so(world: Any) -> None:
    there = serving(world)
    assert there.plan().asks_turn
    there.turn, there.ahead = False, ("ns/first", "ns/second")
    assert (deployments(there), there.plan().asks_turn) == ([], False)
    assert condition(there, "Ready").status == "True", "it is what its owner asked for"
    found = condition(there, "Progressing")
    assert (found.status, found.reason) == ("False", "WaitingForTurn")
    assert "the default runtime image is registry/engine:77 now" in found.message
    assert "now of ns/first and ns/second" in found.message
    assert there.plan().requeue_after
    assert there.status()["revisions"]["generation"] == 1


def test_its_turn_has_a_cause(world: Any) -> None:
    there = serving(world)
    there.turn = True
    [action] = deployments(there)
    assert action.event == ("Updated", "Updated Deployment demo: the default runtime image is registry/engine:77 now.")
    assert action.manifest["spec"]["template"]["spec"]["containers"][0]["image"] == "registry/engine:77"


def test_an_image_of_ones_own_is_a_pin(world: Any) -> None:
    there = serving(world, runtime={"image": "mine:1"})
    assert (deployments(there), there.plan().asks_turn) == ([], False)


def test_another_operator_is_a_new_default_too(world: Any) -> None:
    there = serving(world, runtime={"image": "mine:1"})
    there.settings = Settings(fixed_user=False)
    assert there.plan().asks_turn
    there.turn = True
    assert "this version of the operator" in deployments(there)[0].reason


def test_what_the_owner_changes_never_waits(world: Any) -> None:
    there = serving(world)
    there.service = replace(there.service, generation=2)
    there.turn = False
    assert len(deployments(there)) == 1
    assert there.plan().generation == 2


@pytest.mark.parametrize("why", ["nothing serves", "suspended", "paused"])
def test_where_nobody_is_disturbed_there_is_nothing_to_wait_for(world: Any, why: str) -> None:
    there = serving(world)
    if why == "nothing serves":
        there.pods.clear()
        there.pod(ready=False)
    elif why == "suspended":
        there.service = replace(there.service, suspend=True)
    else:
        there.service = replace(there.service, rollout=replace(there.service.rollout, paused=True))
    there.turn = False
    assert len(deployments(there)) == 1


def test_a_service_that_an_older_operator_noted_waits_as_well(world: Any) -> None:
    there = serving(world)
    status = dict(there.service.status)
    status["revisions"] = {key: value for key, value in status["revisions"].items() if key != "generation"}
    there.service = replace(there.service, status=status)
    assert there.plan().asks_turn


def test_a_rollout_that_is_under_way_is_seen(world: Any) -> None:
    there = serving(world)
    assert not there.plan().rolling
    there.settings = Settings()
    there.record("newest", 2, key="x")
    there.current, there.number = "newest", 2
    there.children["Deployment", "demo"]["metadata"]["annotations"] |= {"deployment.kubernetes.io/revision": "2"}
    there.pod("newest", ready=False)
    assert there.plan().rolling
