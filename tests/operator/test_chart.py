"""charts/stoker, rendered by helm: the schema refuses typos, rights are least, the CRD is the CRD."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.settings import from_arguments

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "stoker"
Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def helm() -> str:
    from e2e.cluster.binaries import ensure

    return str(ensure(["helm"])["helm"])


@pytest.fixture
def render(helm: str) -> Render:
    def run(*arguments: str) -> list[dict[str, Any]]:
        command = [helm, "template", "stoker", str(CHART), "--namespace", "stoker-system", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ValueError(done.stderr)
        return [item for item in yaml.safe_load_all(done.stdout) if item]

    return run


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in manifests if item["kind"] == kind]


def test_lint(helm: str) -> None:
    command = [helm, "lint", "--strict", str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "values",
    [
        "replica=1",
        "image.repo=x",
        "replicas=0",
        "operator.logLevel=loud",
        "cache.size=big",
        "hub.endpoint=hub",
        "metricsAdapter.mode=Maybe",
    ],
)
def test_the_schema_refuses(render: Render, values: str) -> None:
    with pytest.raises(ValueError, match=values.partition("=")[0].rpartition(".")[2]):
        render("--set", values)


def test_the_chart_carries_the_crd(render: Render) -> None:
    source = (ROOT / "crds" / "stoker.dev_inferenceservices.yaml").read_text()
    assert (CHART / "files" / "stoker.dev_inferenceservices.yaml").read_text() == source
    [crd] = of_kind(render(), "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == yaml.safe_load(source)
    assert not of_kind(render("--set", "crds.install=false"), "CustomResourceDefinition")


def test_the_arguments_are_settings(render: Render) -> None:
    [deployment] = of_kind(
        render("--set", "hub.endpoint=http://hub,cache.storageClassName=fast,watchNamespaces={a,b}"), "Deployment"
    )
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "operator"
    chosen = from_arguments(container["args"][1:], {"STOKER_IDENTITY": "pod-1"})
    assert (chosen.hub_endpoint, chosen.cache_storage_class, chosen.namespaces) == ("http://hub", "fast", ("a", "b"))
    assert (chosen.lease_namespace, chosen.runtime_image) == ("stoker-system", "stoker/runtime:0.1.0")
    assert deployment["spec"]["replicas"] == 2


def test_the_operators_pods_are_restricted(render: Render) -> None:
    [deployment] = of_kind(render(), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"livenessProbe", "readinessProbe", "resources"} <= pod["containers"][0].keys()


def test_watched_namespaces_need_no_cluster_role(render: Render) -> None:
    manifests = render("--set", "watchNamespaces={a,b}")
    assert not of_kind(manifests, "ClusterRole")
    assert not of_kind(manifests, "ClusterRoleBinding")
    assert {item["metadata"]["namespace"] for item in of_kind(manifests, "Role")} == {"stoker-system", "a", "b"}


def test_no_right_is_a_wildcard_and_no_secret_can_be_read(render: Render) -> None:
    for role in [*of_kind(render(), "ClusterRole"), *of_kind(render(), "Role")]:
        for rule in role["rules"]:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
            assert not {"secrets", "pods/log", "pods/exec"} & set(rule["resources"])
            assert "nodes" not in rule["resources"] or rule["verbs"] == ["list"]


def test_the_metrics_api_comes_with_the_least_it_needs(render: Render) -> None:
    manifests = render("--set", "prometheus.url=http://prom:9090")
    [service] = of_kind(manifests, "APIService")
    [secret] = of_kind(manifests, "Secret")
    assert service["spec"]["caBundle"] == secret["data"]["tls.crt"]
    [role] = [item for item in of_kind(manifests, "ClusterRole") if item["metadata"]["name"].endswith("-metrics-api")]
    reviews = {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]}
    assert role["rules"] == [reviews]
    [deployment] = of_kind(manifests, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    chosen = from_arguments(pod["containers"][0]["args"][1:], {})
    assert (chosen.metrics_adapter_port, chosen.metrics_adapter_tls) == (6443, "/tls")
    assert chosen.prometheus_url == "http://prom:9090"
    assert pod["volumes"][0]["secret"]["secretName"] == secret["metadata"]["name"]


@pytest.mark.parametrize("values", ["metricsAdapter.mode=Off", "watchNamespaces={a}"])
def test_without_the_metrics_api_nothing_of_it_is_made(render: Render, values: str) -> None:
    manifests = render("--set", values)
    assert not of_kind(manifests, "APIService")
    assert not of_kind(manifests, "Secret")
    assert "6443" not in str(of_kind(manifests, "Deployment"))


def test_a_certificate_of_ones_own(render: Render) -> None:
    manifests = render("--set", "metricsAdapter.tls.secretName=mine,metricsAdapter.tls.caBundle=QUJD")
    assert not of_kind(manifests, "Secret")
    assert of_kind(manifests, "APIService")[0]["spec"]["caBundle"] == "QUJD"


def test_a_single_replica_has_no_budget(render: Render) -> None:
    assert of_kind(render(), "PodDisruptionBudget")
    assert not of_kind(render("--set", "replicas=1"), "PodDisruptionBudget")
