"""What a change costs on a real API server: so many plans and requests, and what is left out is not missed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.reconcile.kubelet import condition

from stoker_operator import reconcile as reconcile_module
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.mirror import Mirror
from stoker_operator.plan.plan import Plan, make_plan
from stoker_operator.reconcile import Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


class Counted:
    """The plans that were made, and requests by verb and kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[Plan] = []
        self.requests: Counter[tuple[str, str]] = Counter()
        once = Cluster._request

        async def request(cluster: Cluster, method: str, kind: kinds.Kind, *rest: Any, **more: Any) -> Any:
            self.requests[method, kind.kind] += 1
            return await once(cluster, method, kind, *rest, **more)

        def plan(*given: Any) -> Plan:
            self.plans.append(make_plan(*given))
            return self.plans[-1]

        monkeypatch.setattr(Cluster, "_request", request)
        monkeypatch.setattr(reconcile_module, "make_plan", plan)

    def clear(self) -> None:
        self.plans.clear()
        self.requests.clear()


def _evicted_at_once(pods: int) -> str:
    """A change of the spec that changes the disruption budget alone."""
    return json.dumps({"spec": {"disruption": {"maxUnavailable": pods}}})


async def _nobody(_: Any) -> None:
    pass


@pytest.fixture
async def mirrored(reconciler: Reconciler, cluster: Cluster, namespace: str) -> AsyncIterator[Reconciler]:
    """A reconciler that reads from memory, as the operator's does."""
    mirror = Mirror(cluster, [namespace], _nobody)
    yield replace(reconciler, cluster=mirror)
    await mirror.stop()


async def test_a_change_is_one_plan_three_writes_and_a_look_at_what_they_made(
    serve: Callable[..., Any],
    mirrored: Reconciler,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await serve("demo", resources={"gpus": 1})

    async def settles() -> bool:
        counted.clear()
        await mirrored.reconcile(namespace, "demo")
        return not counted.plans[-1].actions and not counted.requests

    counted = Counted(monkeypatch)
    await eventually(settles)
    assert len(counted.plans) == 1
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", _evicted_at_once(3))

    async def told() -> bool:
        service = await mirrored.cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
        return service is not None and service["spec"].get("disruption", {}).get("maxUnavailable") == 3

    await eventually(told)
    counted.clear()
    await mirrored.reconcile(namespace, "demo")
    # No verdict is about this generation yet: the GPUs of the cluster, known since a minute ago, are there at once.
    first, second = counted.plans
    assert (len(first.actions), first.asks_more, second.actions) == (1, False, ())
    kind = kinds.INFERENCE_SERVICE.kind
    assert counted.requests == {("PATCH", "PodDisruptionBudget"): 1, ("PATCH", kind): 1, ("POST", "Event"): 1}
    service = await Cluster.get(mirrored.cluster, kinds.INFERENCE_SERVICE, namespace, "demo")
    assert service is not None
    assert service["status"]["observedGeneration"] == service["metadata"]["generation"]
    assert condition(service, "Ready")["observedGeneration"] == service["metadata"]["generation"]
    counted.clear()
    await mirrored.reconcile(namespace, "demo")
    assert (len(counted.plans), counted.requests) == (1, {})


async def test_nodes_are_nobody_s_business_before_a_model_is_there(
    create: Callable[..., Any], mirrored: Reconciler, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create("demo", resources={"gpus": 1})
    counted = Counted(monkeypatch)
    await mirrored.reconcile(namespace, "demo")
    await mirrored.reconcile(namespace, "demo")
    assert counted.requests["GET", "Node"] == 0
    assert counted.requests["PATCH", "Job"] == 1


@pytest.mark.parametrize(
    ("kind", "name", "patch", "path"),
    [
        ("pdb", "demo", {"spec": {"maxUnavailable": "70%"}}, ("spec", "maxUnavailable")),
        ("service", "demo", {"spec": {"selector": {"app": "mine"}}}, ("spec", "selector")),
        ("deployment", "demo", {"spec": {"progressDeadlineSeconds": 77}}, ("spec", "progressDeadlineSeconds")),
    ],
)
async def test_a_child_that_others_change_is_repaired_after_a_change_of_ours(
    kind: str,
    name: str,
    patch: Object,
    path: tuple[str, ...],
    serve: Callable[..., Any],
    mirrored: Reconciler,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
) -> None:
    """What an answer said of a child is not believed longer than a watch says otherwise."""

    def value() -> Any:
        found = json.loads(kubectl("get", kind, name, "-o", "json"))
        for part in path:
            found = found[part]
        return found

    await serve("demo")
    await mirrored.reconcile(namespace, "demo")
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", _evicted_at_once(5))

    async def took_up() -> bool:
        await mirrored.reconcile(namespace, "demo")
        return json.loads(kubectl("get", "pdb", "demo", "-o", "json"))["spec"]["maxUnavailable"] == 5

    await eventually(took_up)
    before = value()
    kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(patch))
    assert value() != before

    async def repaired() -> bool:
        await mirrored.reconcile(namespace, "demo")
        return value() == before

    await eventually(repaired)
