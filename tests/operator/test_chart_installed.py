"""The chart's rights on a real API server: enough for what is switched on, none for what is not, and who may use it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings, from_arguments

pytestmark = pytest.mark.apiserver
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "stoker"
CRD = "crd/inferenceservices.stoker.dev"
FEATURES = (
    "horizontalPodAutoscaler", "keda", "ingress", "gatewayApi", "inferencePool", "prometheusOperator", "dashboards",
    "adapters",
)  # fmt: skip
CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
RIGHTS = (*CLUSTER_WIDE, "ServiceAccount", "Role", "RoleBinding")
Install = Callable[..., Any]


@pytest.fixture
async def install(
    namespace: str, control_plane: Path, kubectl: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Install]:
    """Give an operator the rights of the chart with `values`; returns (a connection with those alone, its settings)."""
    from e2e.cluster.binaries import ensure

    made: list[dict[str, Any]] = []
    connections: list[Cluster] = []

    async def run(*values: str) -> tuple[Cluster, Settings]:
        command = [str(ensure(["helm"])["helm"]), "template", "stoker", str(CHART)]
        command += ["--namespace", namespace, "--set=crds.install=false,metricsAdapter.mode=Off"]
        command += ["--set=image.repository=r/o,runtime.image=r/e:1", *(f"--set={value}" for value in values)]
        rendered = subprocess.run(command, capture_output=True, text=True, check=True)
        chart = [item for item in yaml.safe_load_all(rendered.stdout) if item]
        for item in (item for item in chart if item["kind"] in RIGHTS):
            made.append(item)
            kubectl("apply", "-f", "-", stdin=item)
        config = yaml.safe_load(control_plane.read_text())
        config["users"][0]["user"] = {"token": kubectl("create", "token", "stoker").strip()}
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        connections.append(await Cluster.connect())
        monkeypatch.setenv("KUBECONFIG", str(control_plane))
        [deployment] = [item for item in chart if item["kind"] == "Deployment"]
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        return connections[-1], from_arguments(arguments[1:], {})

    yield run
    for connection in connections:
        await connection.close()
    for item in made:
        if item["kind"] in CLUSTER_WIDE:
            kubectl("delete", item["kind"], item["metadata"]["name"], "--ignore-not-found")


async def conditions(cluster: Cluster, namespace: str) -> dict[str, dict[str, Any]]:
    found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
    assert found is not None
    return {item["type"]: item for item in found["status"]["conditions"]}


async def test_with_everything_switched_off_nothing_of_it_is_asked_for(
    install: Install, cluster: Cluster, namespace: str, create: Callable[..., Any]
) -> None:
    """A refusal would be an ApiError."""
    restricted, settings = await install(*(f"features.{name}=false" for name in FEATURES))
    await create("demo", autoscaling={"max": 3}, endpoint={"ingress": {"host": "llm.example.com"}})
    await Reconciler(restricted, PodClient(2.0), settings).reconcile(namespace, "demo")
    found = await conditions(cluster, namespace)
    assert {found[name]["reason"] for name in ("EndpointReady", "AutoscalingActive", "Monitored")} == {"FeatureOff"}
    assert await cluster.get(kinds.SERVICE, namespace, "demo")


async def test_an_excluded_namespace_is_left_alone(
    install: Install, cluster: Cluster, namespace: str, create: Callable[..., Any]
) -> None:
    restricted, settings = await install(f"excludeNamespaces={{{namespace}}}")
    await create("demo")
    assert await Reconciler(restricted, PodClient(2.0), settings).reconcile(namespace, "demo") is None
    found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
    assert found is not None
    assert "status" not in found
    assert await cluster.get(kinds.SERVICE, namespace, "demo") is None


def config_map(namespace: str, name: str, **labels: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"a": "b"}}


async def test_the_right_to_dashboards_is_good_for_dashboards_alone(
    install: Install, cluster: Cluster, namespace: str, eventually: Callable[..., Any]
) -> None:
    restricted, _ = await install("features.dashboards=true")
    ours = {"app.kubernetes.io/managed-by": "stoker"}
    await cluster.apply(kinds.CONFIG_MAP, config_map(namespace, "users-own"))
    await cluster.apply(kinds.CONFIG_MAP, config_map(namespace, "users-dashboard"))

    async def refused(name: str, **labels: str) -> bool:
        said = ""
        try:
            await restricted.apply(kinds.CONFIG_MAP, config_map(namespace, name, **labels))
        except ApiError as error:
            said = error.message
        assert not said or "writes its own dashboards and lists of adapters" in said
        return bool(said)

    async def guarded() -> bool:
        return await refused("probe")  # the API server takes a policy up a moment after it is made

    await eventually(guarded)
    assert await refused("users-own")
    assert await refused("other", **ours)
    assert await refused("users-dashboard", **ours), "labels of ours do not make a user's ConfigMap ours"
    assert not await refused("demo-dashboard", **ours)
    assert not await refused("demo-adapters", **ours)
    gone = (("users-own", False), ("users-dashboard", False), ("demo-dashboard", True), ("demo-adapters", True))
    for name, goes in gone:
        found = await cluster.get(kinds.CONFIG_MAP, namespace, name)
        assert found is not None
        try:
            await restricted.delete(kinds.CONFIG_MAP, namespace, name, found["metadata"]["uid"])
        except ApiError:
            assert not goes
        assert (await cluster.get(kinds.CONFIG_MAP, namespace, name) is None) is goes


async def test_who_may_edit_or_view_a_namespace_may_use_it(
    install: Install, namespace: str, kubectl: Callable[..., str], eventually: Callable[..., Any]
) -> None:
    await install()
    for role in ("view", "edit", "admin"):
        kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}-user")

    def may(role: str, verb: str, resource: str = "inferenceservices.stoker.dev", part: str = "") -> bool:
        asked = (verb, resource, f"--subresource={part}", f"--as={role}-user")
        return kubectl("auth", "can-i", *asked, check=False).startswith("yes")

    await eventually(lambda: may("view", "list"))  # Kubernetes' own controller adds the rules up
    await eventually(lambda: may("admin", "create") and may("edit", "patch"))
    assert may("edit", "delete", "controllerrevisions.apps"), (
        "the status says to delete the record of a failed revision"
    )
    assert may("edit", "patch", part="scale")
    assert not may("view", "create")
    assert not may("edit", "patch", part="status")


@pytest.fixture
def crd(control_plane: Path, kubectl: Callable[..., str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """The CRD as it is now; what helm wrote on it is taken off again."""

    def read() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(kubectl("get", CRD, "-o", "json"))
        return found

    yield read
    marks = ("meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-", "helm.sh/resource-policy-")
    kubectl("annotate", CRD, *marks, check=False)
    kubectl("label", CRD, "app.kubernetes.io/managed-by-", check=False)


def test_a_release_of_another_name_takes_the_place_of_one_that_is_gone(
    namespace: str, kubectl: Callable[..., str], crd: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    """The CRD outlives its release, and with it every service; the next release leaves it alone until it is told."""
    from e2e.cluster.binaries import ensure

    images = "--set=image.repository=r/o,runtime.image=r.io/e:1,metricsAdapter.mode=Off"

    def helm(*arguments: str) -> str:
        command = [str(ensure(["helm"])["helm"]), "--namespace", namespace, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def owner() -> str:
        return str((crd()["metadata"].get("annotations") or {}).get("meta.helm.sh/release-name", ""))

    uid = crd()["metadata"]["uid"]
    said = helm("install", "first", str(CHART), images)
    assert owner() == "", "a CRD that somebody applied by hand was taken over"
    told = re.search(r"^  kubectl label .*?release-namespace=\S+$", said, re.MULTILINE | re.DOTALL)
    assert told is not None, said
    subprocess.run(["bash", "-ec", f'kubectl() {{ {kubectl_path()} "$@"; }}; {told[0]}'], check=True, timeout=60)
    helm("upgrade", "first", str(CHART), images, "--set=replicas=3")
    assert "kind: CustomResourceDefinition" in helm("get", "manifest", "first")
    assert "not this release's" not in helm("upgrade", "first", str(CHART), images)
    helm("uninstall", "first")
    assert crd()["metadata"]["uid"] == uid, "the CRD went with its release, and all services with it"
    assert owner() == "first"
    assert "not this release's" in helm("install", "second", str(CHART), images)
    helm("uninstall", "second")
    assert (crd()["metadata"]["uid"], owner()) == (uid, "first")


def kubectl_path() -> str:
    from e2e.cluster.binaries import ensure

    return str(ensure(["kubectl"])["kubectl"])
