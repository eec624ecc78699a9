"""Pods that name no user, on a real API server that lets no other in: Pod Security's `restricted` profile, and beside
it a policy that, as the security context constraint restricted-v2 does, leaves users and groups to the cluster.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.reconcile.kubelet import UNSCHEDULED

from stoker_operator import manifests
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

pytestmark = pytest.mark.apiserver
ROOT = Path(__file__).resolve().parents[2]
_PODS = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
_USERS = ("runAsUser", "runAsGroup", "fsGroup")


@pytest.fixture
def no_users(namespace: str, kubectl: Callable[..., str], eventually: Callable[..., Any]) -> Iterator[None]:
    """Only pods get in that leave their user and groups to the cluster."""
    pod = " && ".join(f"!has(object.spec.securityContext.{field})" for field in _USERS)
    each = "object.spec.{}.all(c, !has(c.securityContext) || !has(c.securityContext.runAsUser))"
    rules = [
        f"!has(object.spec.securityContext) || ({pod})",
        each.format("containers"),
        f"!has(object.spec.initContainers) || {each.format('initContainers')}",
    ]
    spec: dict[str, Any] = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
            ],
        },
        "validations": [{"expression": rule, "message": "the cluster gives the user"} for rule in rules],
    }
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": namespace}}
    binding = {"policyName": namespace, "validationActions": ["Deny"]}
    kubectl("create", "-f", "-", stdin=head | {"kind": "ValidatingAdmissionPolicy", "spec": spec})
    kubectl("create", "-f", "-", stdin=head | {"kind": "ValidatingAdmissionPolicyBinding", "spec": binding})
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    yield
    kubectl("delete", "validatingadmissionpolicybinding", namespace)
    kubectl("delete", "validatingadmissionpolicy", namespace)


@pytest.fixture
def admitted(kubectl: Callable[..., str], no_users: None) -> Callable[[dict[str, Any]], str]:
    """What the API server says to a pod of this template; "" = it gets in."""

    def ask(template: dict[str, Any]) -> str:
        meta = {"name": "tried", "labels": template.get("metadata", {}).get("labels", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}
        said = kubectl("create", "--dry-run=server", "-o", "name", "-f", "-", stdin=pod, check=False)
        return "" if said.strip() == "pod/tried" else said

    return ask


async def test_every_pod_gets_in_without_a_user_and_none_with_one(
    service: Callable[..., InferenceService],
    model: FetchedModel,
    admitted: Callable[[dict[str, Any]], str],
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    namespace: str,
) -> None:
    asked = service(placement=UNSCHEDULED, cache={"verify": "Scheduled"}, replicas=2)
    kubectl("create", "serviceaccount", "demo")

    def templates(settings: Settings) -> dict[str, dict[str, Any]]:
        engine = manifests.deployment(asked, settings, model, first_variant(asked))
        fetch = manifests.prefetch_job(asked, settings, "uid", 1)
        verify = {"spec": manifests.verify_pod(asked, settings, model)}
        return {"engine": engine["spec"]["template"], "fetch": fetch["spec"]["template"], "verify": verify}

    fixed, free = templates(Settings()), templates(Settings(fixed_user=False))
    # A policy is in force some moments after it was made.
    await eventually(lambda: "the cluster gives the user" in admitted(fixed["engine"]))
    assert {name: admitted(template) for name, template in free.items()} == dict.fromkeys(free, "")
    assert all("the cluster gives the user" in admitted(template) for template in fixed.values())


async def test_the_operators_own_pods_get_in(
    admitted: Callable[[dict[str, Any]], str], eventually: Callable[..., Any], kubectl: Callable[..., str]
) -> None:
    def templates(openshift: str) -> list[dict[str, Any]]:
        from e2e.cluster.binaries import ensure

        command = [str(ensure(["helm"])["helm"]), "template", "stoker", str(ROOT / "charts" / "stoker")]
        command += [f"--set=openshift={openshift},activator.enabled=true,image.repository=r/o,runtime.image=r/e:1"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = [item for item in yaml.safe_load_all(done.stdout) if item and item["kind"] == "Deployment"]
        return [item["spec"]["template"] for item in found]

    for account in {item["spec"]["serviceAccountName"] for item in templates("On")}:
        kubectl("create", "serviceaccount", account)
    await eventually(lambda: all("the cluster gives the user" in admitted(item) for item in templates("Off")))
    assert [admitted(item) for item in templates("On")] == ["", ""]
