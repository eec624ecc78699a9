"""The adapter behind a real kube-apiserver's aggregator, with a certificate of its own making and the chart's rights;
and a real HorizontalPodAutoscaler controller that scales a real Deployment by it. The pods' part is played on loopback.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stoker_operator import manifests
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.metrics_adapter.registration import NAME, Registration, read_pair
from stoker_operator.metrics_adapter.server import Adapter
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

pytestmark = pytest.mark.apiserver
ROOT = Path(__file__).resolve().parents[3]
API = "/apis/custom.metrics.k8s.io/v1beta2"
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "demo"}}
Object = dict[str, Any]

# What it does with the option ServerSideApply=true.
ARGO_CD = ("--server-side", "--force-conflicts", "--field-manager=argocd-controller")


@pytest.fixture
async def scaled(
    namespace: str,
    service: Callable[..., InferenceService],
    model: FetchedModel,
    cluster: Cluster,
    ask: Callable[..., Any],
    engines: dict[str, float],
    registration: Registration,
    eventually: Callable[..., Any],
) -> Callable[[], Any]:
    """A Deployment and its autoscaler as the operator makes them; returns how many pods the Deployment wants."""
    fast = {"stabilization": "0s", "maxPods": 2, "period": "1s"}
    built = service(
        "demo",
        autoscaling={"min": 1, "max": 3, "scaleUp": fast, "scaleDown": fast},
        placement={"schedulerName": "nobody"},
    )
    assert built.autoscaling is not None
    for manifest in (
        manifests.service_account(built),
        manifests.deployment(built, Settings(), model, first_variant(built)),
        manifests.pod_autoscaler(built, built.autoscaling, DEPLOYMENT),
    ):
        manifest["metadata"] = {k: v for k, v in manifest["metadata"].items() if k != "ownerReferences"}
        manifest["metadata"]["namespace"] = namespace
        await cluster.apply(kinds.BY_NAME[manifest["kind"]], manifest)

    async def desired() -> int:
        for pod in await cluster.list_all(kinds.POD, namespace):
            status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
            if pod["status"].get("phase") != "Running":
                meta = {"name": pod["metadata"]["name"], "namespace": namespace}
                manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}
                await cluster.apply(kinds.POD, manifest, subresource="status")
        deployment = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
        assert deployment is not None
        return int(deployment["spec"]["replicas"])

    return desired


async def test_the_api_server_serves_the_engines_gauges(
    scaled: Callable[[], Any],
    engines: dict[str, float],
    ask: Callable[..., Any],
    namespace: str,
    eventually: Callable[..., Any],
) -> None:
    engines["waiting"] = 7.0

    async def values() -> list[Object]:
        await scaled()
        path = f"{API}/namespaces/{namespace}/pods/*/vllm:num_requests_waiting"
        answer = await ask("get", "--raw", path, check=False)
        found: list[Object] = json.loads(answer)["items"] if answer.startswith("{") else []
        return found

    [item, *_] = await eventually(values)
    assert item["value"] == "7000m"
    available = await ask("get", "apiservice", "v1beta2.custom.metrics.k8s.io", "-o", "json")
    [condition] = json.loads(available)["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("Available", "True")
    assert "pods/vllm:num_requests_waiting" in await ask("get", "--raw", API)
    groups = json.loads(await ask("get", "--raw", "/apis"))["groups"]
    assert "custom.metrics.k8s.io" in [group["name"] for group in groups]
    # A user whom the API server would not let read them is refused.
    refused = await ask("get", "--raw", f"{API}/namespaces/{namespace}/pods/*/vllm:x", "--as=eve", check=False)
    assert "orbidden" in refused


async def test_the_real_autoscaler_follows_the_queue(
    scaled: Callable[[], Any], engines: dict[str, float], ask: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    async def active() -> bool:
        await scaled()
        hpa = json.loads(await ask("get", "hpa", "demo", "-o", "json"))
        conditions = {item["type"]: item for item in hpa["status"].get("conditions", [])}
        return bool(conditions.get("ScalingActive", {}).get("status") == "True")

    await eventually(active, 40)
    engines["waiting"] = 50.0

    async def at(count: int) -> bool:
        return bool(await scaled() == count)

    await eventually(lambda: at(3), 30)  # never above max, whatever the queue
    engines["waiting"] = 0.0
    await eventually(lambda: at(1), 30)


async def test_a_client_that_is_not_the_api_server_learns_nothing(adapter: Adapter, registration: Registration) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    url = f"https://127.0.0.1:{adapter.port}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:
        for path in (API, f"{API}/namespaces/default/pods/*/vllm:num_requests_waiting"):
            async with session.get(url + path, headers={"X-Remote-User": "system:admin"}) as answer:
                assert answer.status == 401
                assert (await answer.json())["kind"] == "Status"
        async with session.get(f"{url}/healthz") as answer:
            assert answer.status == 200


async def test_a_renewed_certificate_is_served_and_trusted_without_a_gap(
    release: tuple[Cluster, Settings],
    adapter: Adapter,
    registration: Registration,
    ask: Callable[..., Any],
    eventually: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker_operator.metrics_adapter.server.RENEWAL_SECONDS", 0.05)

    async def answers() -> bool:
        return NAME.partition(".")[0] in await ask("get", "--raw", API, check=False)

    await eventually(answers)
    before = await read_pair(*release)
    later = datetime.now(UTC) + timedelta(days=300)
    assert await Registration(*release, adapter.serving, clock=lambda: later).once()
    after = await read_pair(*release)
    assert before is not None
    assert after is not None
    assert before.certificate != after.certificate
    for _ in range(20):  # those who trust it learn of it at other moments than those who serve
        assert await answers()
        await asyncio.sleep(0.05)
    assert await Registration(*release, adapter.serving, clock=lambda: later).once()
    assert await read_pair(*release) == after, "one that is not due was made anew"


def foreign(name: str) -> Object:
    """The registration of somebody else's adapter."""
    version = name.partition(".")[0]
    backend = {"name": "prometheus-adapter", "namespace": "monitoring"}
    spec = {"group": "custom.metrics.k8s.io", "version": version, "groupPriorityMinimum": 100, "versionPriority": 100}
    meta = {"name": name}
    head = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": meta}
    return head | {"spec": spec | {"service": backend, "insecureSkipTLSVerify": True}}


@pytest.mark.parametrize("name", ["v1beta1.custom.metrics.k8s.io", NAME])
@pytest.mark.parametrize("mode", ["Auto", "On"])
async def test_another_adapter_keeps_what_it_serves(
    release: tuple[Cluster, Settings], adapter: Adapter, ask: Callable[..., Any], name: str, mode: str
) -> None:
    cluster, settings = release
    ours = Registration(cluster, replace(settings, metrics_adapter_mode=mode), adapter.serving)
    await ours.once()
    await asyncio.wait_for(adapter.serving.wait(), 10)

    async def backend(of: str) -> str:
        return str(await ask("get", "apiservice", of, "-o", "jsonpath={.spec.service.name}", "--ignore-not-found"))

    try:
        await ask("delete", "apiservice", name, "--ignore-not-found")
        await ask("apply", "-f", "-", stdin=foreign(name))
        beside = mode == "On" and name != NAME
        assert await ours.once() is beside
        assert await backend(name) == "prometheus-adapter", "it was taken over"
        assert (await backend(NAME) == settings.metrics_adapter_service) is beside
        assert beside or f"{name} (Service monitoring/prometheus-adapter)" in ours.state
        await ask("delete", "apiservice", name)
        assert await ours.once(), "the way is free, and it was not taken"
        assert await backend(NAME) == settings.metrics_adapter_service
        if name != NAME:
            await ask("apply", "-f", "-", stdin=foreign(name))
            assert await ours.once() is beside
            assert (await backend(NAME) == settings.metrics_adapter_service) is beside
    finally:
        await ask("delete", "apiservice", name, "--ignore-not-found")


async def test_the_registration_goes_with_the_release(
    release: tuple[Cluster, Settings],
    registration: Registration,
    ask: Callable[..., Any],
    eventually: Callable[..., Any],
) -> None:
    _, settings = release
    await ask("delete", "clusterrole", settings.metrics_adapter_owner)

    async def gone() -> bool:
        return not await ask("get", "apiservice", NAME, "-o", "name", "--ignore-not-found")

    await eventually(gone)


@pytest.mark.parametrize("other", ["absent", "ready", "not ready", "terminating"])
async def test_the_last_replica_takes_the_registration_back(
    release: tuple[Cluster, Settings],
    registration: Registration,
    ask: Callable[..., Any],
    other: str,
    cluster: Cluster,
    namespace: str,
) -> None:
    """Without a backend it would keep Kubernetes from deleting any namespace."""
    _, settings = release
    selector = {"app.kubernetes.io/name": "stoker-operator"}
    await ask("patch", "service", settings.metrics_adapter_service, "-p", json.dumps({"spec": {"selector": selector}}))
    if other != "absent":
        meta = {"name": "stoker-1", "namespace": namespace, "labels": selector}
        if other == "terminating":
            meta["finalizers"] = ["stoker.dev/test"]  # type: ignore[assignment]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta}
        await cluster.apply(kinds.POD, pod | {"spec": {"containers": [{"name": "c", "image": "i"}]}})
        ready = [{"type": "Ready", "status": str(other != "not ready")}]
        await cluster.apply(kinds.POD, pod | {"metadata": meta, "status": {"conditions": ready}}, subresource="status")
    if other == "terminating":
        await ask("delete", "pod", "stoker-1", "--wait=false")
    await registration.leave()
    there = await ask("get", "apiservice", NAME, "-o", "name", "--ignore-not-found")
    assert bool(there) is (other == "ready")
    await ask("patch", "pod", "stoker-1", "--type=merge", "-p", '{"metadata": {"finalizers": null}}', check=False)


@pytest.mark.parametrize("way", [(), ARGO_CD], ids=["kubectl", "Argo CD"])
async def test_rendering_and_applying_the_chart_again_changes_nothing(
    release: tuple[Cluster, Settings],
    registration: Registration,
    chart: list[Object],
    ask: Callable[..., Any],
    way: tuple[str, ...],
) -> None:
    """Long after the operator has filled what is its to fill."""
    items = [item for item in chart if item["kind"] != "Service"]  # which in this test leads elsewhere
    lists = {item["metadata"].get("namespace", ""): {"apiVersion": "v1", "kind": "List", "items": []} for item in items}
    for item in items:
        lists[item["metadata"].get("namespace", "")]["items"].append(item)

    async def applied() -> list[str]:
        """The versions of what is there after all of it was applied. kubectl calls a budget `configured` each time."""
        for place, body in lists.items():
            await ask("apply", *way, "-n", place, "-f", "-", stdin=body)
        version = "jsonpath={range .items[*]}{.metadata.uid} {.metadata.resourceVersion}{'\\n'}{end}"
        return [await ask("get", "-n", place, "-f", "-", "-o", version, stdin=body) for place, body in lists.items()]

    first = await applied()
    pair = await read_pair(*release)
    assert await applied() == first
    assert await read_pair(*release) == pair
    assert pair is not None
    for place, body in lists.items():  # it ends with 1, and the difference, where there is one
        assert await ask("diff", *way, "-n", place, "-f", "-", stdin=body) == ""
