"""The kinds that a cluster may lack, by their publishers' own definitions: what is made is valid, is made where the
kind is served, and where it is not the status says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.plan.rollout import first_variant
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

pytestmark = pytest.mark.apiserver
Build = Callable[..., InferenceService]
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "demo"}}
Object = dict[str, Any]
SPEC: Object = {
    "endpoint": {
        "httpRoute": {"parentRefs": [{"name": "gw", "sectionName": "https"}], "hostnames": ["llm.example.com"]},
        "inferencePool": {"endpointPickerRef": {"name": "picker", "port": 9107, "failureMode": "FailOpen"}},
    },
    "autoscaling": {"engine": "KEDA", "min": 1, "max": 4, "targets": {"kvPercent": 80}},
}
SPANNING: Object = {
    "replicas": 3,
    "resources": {"gpus": 2, "nodes": 3, "cpu": "9", "memory": "64Gi"},
    "parallelism": {"tensor": 2, "pipeline": 3},
    "runtime": {"shmSize": "5Gi"},
    "placement": {"queueName": "big"},
    "podTemplate": {"spec": {"containers": [{"name": "side", "image": "s", "ports": [{"containerPort": 7}]}]}},
}
NAMES = {
    "gateway": ["httproutes.gateway.networking.k8s.io"],
    "inference": ["inferencepools.inference.networking.k8s.io"],
    "monitoring": ["podmonitors.monitoring.coreos.com", "prometheusrules.monitoring.coreos.com"],
    "keda": ["scaledobjects.keda.sh"],
}


@pytest.fixture
def installed(control_plane: Path) -> Iterator[None]:
    """All of the definitions, for one test: they would change what the others see."""
    from e2e.cluster.binaries import ensure
    from e2e.cluster.crds import definitions

    kubectl = str(ensure(["kubectl"])["kubectl"])
    environment = os.environ | {"KUBECONFIG": str(control_plane)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([kubectl, *arguments], env=environment, capture_output=True, text=True, check=False)

    names = [f"crd/{name}" for group in NAMES.values() for name in group]
    try:
        for group in NAMES:
            for file in definitions(group):
                made = run("create", "-f", str(file))
                assert made.returncode == 0, made.stderr
        deadline = time.monotonic() + 60
        while run("wait", "--for=condition=Established", *names).returncode != 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield
    finally:
        run("delete", "--ignore-not-found", *names)


async def conditions(cluster: Cluster, namespace: str) -> dict[str, Object]:
    found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
    assert found is not None
    return {item["type"]: item for item in found["status"]["conditions"]}


async def test_where_a_kind_is_missing_the_status_says_so(
    reconciler: Reconciler, cluster: Cluster, namespace: str, create: Callable[..., Any]
) -> None:
    await create("demo", **SPEC)
    await reconciler.reconcile(namespace, "demo")
    found = await conditions(cluster, namespace)
    assert found["EndpointReady"]["reason"] == "InferencePoolMissing"
    assert found["Monitored"]["reason"] == "PrometheusOperatorMissing"
    assert found["AutoscalingActive"]["reason"] == "KedaMissing"


async def test_where_they_are_served_they_are_made(
    installed: None, reconciler: Reconciler, cluster: Cluster, namespace: str, create: Callable[..., Any]
) -> None:
    await create("demo", **SPEC)
    await reconciler.reconcile(namespace, "demo")
    for kind in (kinds.HTTP_ROUTE, kinds.INFERENCE_POOL, kinds.POD_MONITOR, kinds.PROMETHEUS_RULE):
        assert await cluster.get(kind, namespace, "demo"), kind.kind
    assert await cluster.get(kinds.CONFIG_MAP, namespace, "demo-dashboard")
    found = await conditions(cluster, namespace)
    assert (found["EndpointReady"]["reason"], found["Monitored"]["reason"]) == ("NoGateway", "Applied")
    assert found["AutoscalingActive"]["reason"] == "PrometheusUnknown"
    told = Reconciler(cluster, PodClient(2.0), Settings(prometheus_url="http://prometheus:9090"))
    await told.reconcile(namespace, "demo")
    assert (await conditions(cluster, namespace))["AutoscalingActive"]["reason"] == "Pending"


async def test_a_pool_is_kept_as_it_is_and_goes_with_its_field(
    installed: None, reconciler: Reconciler, cluster: Cluster, namespace: str, create: Callable[..., Any]
) -> None:
    """Somebody adds a label that no pod has; then the owner takes the field away, and clients stay served."""
    await create("demo", **SPEC)
    await reconciler.reconcile(namespace, "demo")
    pool = await cluster.get(kinds.INFERENCE_POOL, namespace, "demo")
    assert pool is not None
    wanted = pool["spec"]
    added = {"spec": {"selector": {"matchLabels": {"zone": "b"}}, "endpointPickerRef": {"port": {"number": 1}}}}
    await cluster.merge(kinds.INFERENCE_POOL, namespace, "demo", added)
    await reconciler.reconcile(namespace, "demo")
    await reconciler.reconcile(namespace, "demo")
    mended = await cluster.get(kinds.INFERENCE_POOL, namespace, "demo")
    assert mended is not None
    assert mended["spec"] == wanted
    await cluster.merge(kinds.INFERENCE_SERVICE, namespace, "demo", {"spec": {"endpoint": {"inferencePool": None}}})
    await reconciler.reconcile(namespace, "demo")
    assert await cluster.get(kinds.INFERENCE_POOL, namespace, "demo") is None
    route = await cluster.get(kinds.HTTP_ROUTE, namespace, "demo")
    assert route is not None
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"], backend["port"]) == ("Service", "demo", 8000)


async def test_every_field_is_one_of_theirs(
    installed: None, kubectl: Callable[..., str], namespace: str, service: Build
) -> None:
    """Strictly: an unknown field is an error, and each publisher's own rules hold."""
    built = replace(service(**SPEC), namespace=namespace)
    assert built.endpoint.http_route is not None
    assert built.endpoint.inference_pool is not None
    assert built.autoscaling is not None
    made = [
        manifests.http_route(built, built.endpoint.http_route, pool=True),
        manifests.http_route(built, built.endpoint.http_route, pool=False, share=7),
        manifests.inference_pool(built, built.endpoint.inference_pool),
        manifests.pod_monitor(built),
        manifests.prometheus_rule(built),
        manifests.scaled_object(built, built.autoscaling, DEPLOYMENT, "http://prometheus:9090"),
        manifests.dashboard(built),
        manifests.pod_autoscaler(built, replace(built.autoscaling, engine="HPA"), DEPLOYMENT),
    ]
    for manifest in made:
        said = kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(manifest))
        assert "created" in said


async def test_every_field_of_groups_is_one_of_theirs(
    groups_defined: None, kubectl: Callable[..., str], namespace: str, service: Build, settings: Settings,
    model: FetchedModel,
) -> None:  # fmt: skip
    """Also in the pod templates, which their publisher's definition spells out; and none is dropped or changed."""
    stepwise = {"strategy": "RollingUpdate", "maxSurge": 1, "maxUnavailable": 0}
    for rollout in ({}, stepwise, {"strategy": "Recreate"}):
        built = replace(service(**SPANNING, rollout=rollout), namespace=namespace)
        manifest = manifests.workload_manifest(built, settings, model, first_variant(built))
        assert manifest["kind"] == "LeaderWorkerSet"
        # Applied is how the operator writes it.
        for way in (["create"], ["apply", "--server-side"]):
            command = [*way, "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-"]
            held = json.loads(kubectl(*command, stdin=manifest))
            assert not missing(manifest["spec"], held["spec"], "spec")


def missing(wanted: Any, held: Any, path: str) -> list[str]:
    """Where `held` lacks, or has otherwise, what is `wanted`."""
    if isinstance(wanted, Mapping):
        return [text for key in wanted for text in missing(wanted[key], held.get(key), f"{path}.{key}")]
    if isinstance(wanted, list) and isinstance(held, list) and len(wanted) == len(held):
        pairs = enumerate(zip(wanted, held, strict=True))
        return [text for number, pair in pairs for text in missing(*pair, f"{path}[{number}]")]
    return [] if wanted == held else [f"{path}: {wanted!r} became {held!r}"]
