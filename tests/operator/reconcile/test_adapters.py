"""Adapters on a real API server: fetched by Jobs, listed in a ConfigMap, and no pod or template is ever touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.reconcile.everything import versions
from tests.operator.reconcile.kubelet import REPORT, Node, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.reconcile import Reconciler

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


@pytest.fixture
def until(
    reconciler: Reconciler, cluster: Cluster, namespace: str, eventually: Callable[..., Any]
) -> Callable[..., Any]:
    """Reconcile until AdaptersReady has a reason; returns the whole object."""

    async def wait(reason: str) -> Object:
        async def there() -> Object | None:
            await reconciler.reconcile(namespace, "demo")
            found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
            assert found is not None
            return found if condition(found, "AdaptersReady")["reason"] == reason else None

        return await eventually(there)  # type: ignore[no-any-return]

    return wait


async def fetched(node: Node, eventually: Callable[..., Any], uri: str, report: Object, code: int = 0) -> None:
    """The prefetch pod of `uri` ends."""

    async def there() -> Object | None:
        pods = [pod for pod in await node.pods("fetch") if pod.get("status", {}).get("phase") in (None, "", "Pending")]
        return next((pod for pod in pods if uri in pod["spec"]["containers"][0]["args"]), None)

    node.end(await eventually(there), code, report)


async def test_adapters_come_and_go_beside_pods_that_nobody_touches(
    serve: Callable[..., Any], until: Callable[..., Any], node: Node, cluster: Cluster, namespace: str,
    kubectl: Callable[..., str], eventually: Callable[..., Any], reconciler: Reconciler, ready: Object,
) -> None:  # fmt: skip
    await serve("demo", model={"uri": "hf://org/model", "adapters": []}, replicas=2)

    async def listed() -> list[Object]:
        found = await cluster.get(kinds.CONFIG_MAP, namespace, "demo-adapters")
        assert found is not None
        return list(json.loads(found["data"]["adapters.json"])["adapters"])

    async def untouched() -> tuple[Any, ...]:
        deployment = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
        assert deployment is not None
        pods = {pod["metadata"]["uid"] for pod in await node.pods("engine")}
        return deployment["metadata"]["generation"], deployment["spec"]["template"], pods

    def ask(*adapters: Object) -> None:
        patch = json.dumps({"spec": {"model": {"adapters": list(adapters)}}})
        kubectl("patch", "inferenceservice", "demo", "--type=merge", "-p", patch)

    before = await untouched()
    assert await listed() == []
    ask({"name": "sql", "uri": "hf://o/sql", "revision": "v1"}, {"name": "lost", "uri": "hf://o/lost"})
    await until("AdaptersFetching")
    gone = {"reason": "ModelNotFound", "message": "hf://o/lost: there is no such repository."}
    await fetched(node, eventually, "hf://o/lost", gone, 3)
    await until("ModelNotFound")
    await fetched(node, eventually, "hf://o/sql", REPORT | {"serve": REPORT["path"]})
    await eventually(lambda: until("ModelNotFound"))
    digest = str(REPORT["digest"])

    async def is_listed() -> bool:
        await reconciler.reconcile(namespace, "demo")
        return await listed() == [{"name": "sql", "path": f"/models/{REPORT['path']}", "digest": digest}]

    await eventually(is_listed)
    ready |= {"adapters": [{"name": "sql", "digest": digest, "state": "loaded"}]}
    found = await until("ModelNotFound")
    states = {each["name"]: (each["state"], each["pods"]) for each in found["status"]["adapters"]}
    assert states == {"sql": ("Loaded", 2), "lost": ("FetchFailed", 0)}
    assert condition(found, "Ready")["status"] == "True"
    ask({"name": "sql", "uri": "hf://o/sql", "revision": "v1"})
    found = await until("AdaptersServed")
    assert found["status"]["adapters"][0]["revision"] == REPORT["resolvedRevision"]
    await reconciler.reconcile(namespace, "demo")  # what the end of a Job left
    settled = await versions(cluster, namespace)
    await reconciler.reconcile(namespace, "demo")
    assert await versions(cluster, namespace) == settled
    ask()
    await until("AdaptersServed")
    assert await listed() == []
    assert await untouched() == before
