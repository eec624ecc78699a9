"""A new default image on a real API server: it reaches so many services at a time, stops where it fails, and leaves
alone who has an image of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.reconcile.kubelet import Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.queue import Key
from stoker_operator.cluster.turns import Turns
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.observe.rollout import is_ready
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]
NEWER = "registry/engine:31"
NAMES = ("alpha", "beta", "gamma", "delta")


@pytest.fixture
def images(cluster: Cluster, namespace: str) -> Callable[[], Any]:
    async def read() -> dict[str, str]:
        """The image that each service's Deployment asks for."""
        found = await cluster.list_all(kinds.DEPLOYMENT, namespace)
        return {item["metadata"]["name"]: item["spec"]["template"]["spec"]["containers"][0]["image"] for item in found}

    return read


async def one_after_the_other(serve: Callable[..., Any]) -> None:
    for name in NAMES:
        await serve(name, **({"runtime": {"image": "mine:1"}} if name == "delta" else {}))


async def test_it_reaches_one_service_at_a_time(
    serve: Callable[..., Any], cluster: Cluster, namespace: str, node: Node, images: Callable[[], Any]
) -> None:
    await one_after_the_other(serve)
    woken: list[Key] = []

    async def wake(key: Key) -> None:
        woken.append(key)

    def operator(turns: Turns) -> Reconciler:
        return Reconciler(cluster, PodClient(2.0), Settings(runtime_image=NEWER), turns=turns, wake=wake)

    reconciler = operator(Turns(1, patience=0))
    order: list[str] = []
    for round_ in range(200):
        if round_ == 7:  # another operator takes over in the middle, and knows nothing but what it sees
            reconciler = operator(Turns(1, patience=0))
            for key in reconciler_order(order):
                await reconciler.reconcile(namespace, key)
        for name in NAMES:
            await reconciler.reconcile(namespace, name)
        asked = {name for name, image in (await images()).items() if image == NEWER}
        order += sorted(asked - set(order))
        unfinished = []
        for name in asked:
            found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, name)
            assert found is not None
            if condition(found, "Ready")["status"] != "True":
                unfinished.append(name)
        assert len(unfinished) <= 1, f"{unfinished} were disturbed at once"
        waiting = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "gamma")
        assert waiting is not None
        if "gamma" not in asked:
            assert condition(waiting, "Ready")["status"] == "True", "who waits serves on"
        if len(asked) == 3 and not unfinished:
            break
        for pod in await node.pods("engine"):
            if not is_ready(pod) and round_ % 3 == 0:
                node.run(pod, check=False)
        await asyncio.sleep(0.05)
    assert set(order) == {"alpha", "beta", "gamma"}, await images()
    assert (await images())["delta"] == "mine:1"
    assert {name for _, name in woken} <= set(NAMES)
    events = await cluster.list_all(kinds.EVENT, namespace)
    causes = [item["message"] for item in events if f"the default runtime image is {NEWER} now" in item["message"]]
    assert len(causes) >= 3


def reconciler_order(order: list[str]) -> list[str]:
    """Who was reached already is looked at first, as every service is once before anybody gets a turn."""
    return [*order, *(name for name in NAMES if name not in order)]


async def test_where_it_fails_it_stops(
    serve: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    node: Node,
    images: Callable[[], Any],
    eventually: Callable[..., Any],
) -> None:
    for name in ("alpha", "beta"):
        await serve(name, rollout={"progressDeadline": "2s"})
    reconciler = Reconciler(cluster, PodClient(2.0), Settings(runtime_image=NEWER), turns=Turns(1, patience=0))

    async def reason(name: str, kind: str = "Ready") -> Object:
        for each in ("alpha", "beta"):
            await reconciler.reconcile(namespace, each)
        found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, name)
        assert found is not None
        return condition(found, kind)

    async def rolled_back() -> bool:
        return bool((await reason("alpha"))["reason"] == "RolledBack")

    await eventually(rolled_back, 40)
    for _ in range(10):
        for pod in await node.pods("engine"):
            if not is_ready(pod):
                node.run(pod, check=False)
        waiting = await reason("beta", "Progressing")
        assert (await images())["beta"] != NEWER, "it went on to the next one"
    assert waiting["reason"] == "WaitingForTurn"
    assert f"now of {namespace}/alpha" in waiting["message"]
    # A person takes the new default back: nobody waits for anything any more.
    reconciler = replace(reconciler, settings=Settings())

    async def settled() -> bool:
        return (await reason("alpha"))["reason"] == (await reason("beta"))["reason"] == "Serving"

    await eventually(settled)
    assert (await reason("beta", "Progressing"))["reason"] == "Settled"
