"""A random walk: what may befall a service, in any order, on a real API server with pods as their statuses would say.

After each step: Ready only while a pod answers; nothing of another owner is touched; at rest nobody writes; who serves
is never lost to one that cannot run. In the end a corrected spec serves, whatever came before.

STOKER_WALKS says how many histories are walked. One that fails is printed as the list that KEPT takes; what is there
failed with a fault put back in, or names what was once reported.
"""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.operator.reconcile.kubelet import condition
from tests.operator.reconcile.walk import GOOD, STEPS, Step, World, serve

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.manifests import cache, workload

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(3000)]
WALKS = int(os.environ.get("STOKER_WALKS", "4"))
# After these whoever serves must go on serving.
HARMLESS = {
    "another_revision", "a_wrong_image", "a_right_image", "a_selector_without_a_node", "no_selector", "memory",
    "another_model", "another_secret", "fetches_fail", "a_child_is_edited", "a_child_is_deleted", "jobs_are_deleted",
    "time_passes", "the_operator_is_killed", "nodes_come_back", "a_file_rots",
}  # fmt: skip
KEPT: dict[str, list[Step]] = {
    "every step once": [(name, 1) for name in STEPS],
    "memory that no node has": [("memory", 2), ("memory", 1)],
    "a selector that no node has": [("a_selector_without_a_node", 0), ("another_revision", 4)],
    "a wrong image, then a lost node": [("a_wrong_image", 0), ("a_node_is_lost", 0), ("time_passes", 1)],
    "rot that is not mended yet": [("a_file_rots", 0), ("fetches_fail", 2), ("time_passes", 2), ("a_wrong_image", 1)],
    "rot, a full disk and a clock ahead": [("a_file_rots", 1), ("fetches_fail", 3), ("time_passes", 2)],
    "two that cannot run at once": [("a_wrong_image", 1), ("memory", 2), ("another_model", 1), ("fetches_fail", 2)],
}


async def walk(history: list[Step]) -> None:
    cluster = await Cluster.connect()
    world = World(cluster)
    runner = await serve(world)
    port = runner.addresses[0][1]
    patch = pytest.MonkeyPatch()
    patch.setattr(workload, "PORT", port)
    patch.setattr(cache, "PROGRESS_PORT", port)
    try:
        await world.begin()
        await world.settle()
        for name, number in history:
            serving = await world.answering()
            world.said.append(f"--- {name} {number}")
            await STEPS[name](world, number)
            await world.settle()
            await check(world, name, bool(serving))
        await correct(world)
    except AssertionError as error:
        raise AssertionError(f"{error}\nhistory: {history}\n" + "\n".join(world.said[-40:])) from error
    finally:
        patch.undo()
        await world.end()
        await runner.cleanup()
        await cluster.close()


async def check(world: World, name: str, served: bool) -> None:
    """What holds after every step, at rest."""
    there = await world.cluster.get(kinds.NETWORK_POLICY, world.namespace, "theirs")
    assert there is not None, "a stranger's object was deleted"
    assert there["metadata"]["resourceVersion"] == world.theirs["metadata"]["resourceVersion"]
    found = await world.service()
    answering, ready = await world.answering(), condition(found, "Ready")
    if served and name in HARMLESS:
        assert answering, f"who served was lost to {name}; it says {ready}"
    servable = condition(found, "Servable")
    assert (servable["status"] == "True") == bool(answering), f"Servable is {servable['status']}: {servable['message']}"
    assert found["status"]["observedGeneration"] == found["metadata"]["generation"]


async def correct(world: World) -> None:
    """Everything is put right: the spec, the source, the nodes; what waits for its time gets it."""
    world.dead.clear()
    world.fetch_fails = ""
    spec = {"suspend": False, "placement": GOOD["placement"] | {"nodeSelector": None}, "replicas": 1}
    await world.change(GOOD | spec | {"runtime": GOOD["runtime"] | {"args": None}})
    world.said.append("--- corrected")
    for _ in range(3):
        await world.settle()
        ready = condition(await world.service(), "Ready")
        if ready["status"] == "True":
            assert await world.answering()
            return
        world.later += timedelta(seconds=700)
    raise AssertionError(f"a corrected spec does not serve: {ready['reason']}: {ready['message']}")


HISTORIES = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 11)), min_size=4, max_size=12)


@settings(
    max_examples=WALKS,
    deadline=None,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(history=HISTORIES)
def test_whatever_befalls_a_service(control_plane: Path, history: list[Step]) -> None:
    os.environ["KUBECONFIG"] = str(control_plane)
    asyncio.run(walk(history))


@pytest.mark.parametrize("history", KEPT.values(), ids=KEPT)
def test_what_failed_once(control_plane: Path, monkeypatch: pytest.MonkeyPatch, history: list[Step]) -> None:
    monkeypatch.setenv("KUBECONFIG", str(control_plane))
    asyncio.run(walk(history))
