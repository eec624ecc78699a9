"""manifests/pod_template.py: what is merged into the engine's pods, and what no merge changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.manifests import engine_template, prefetch_job
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

Build = Callable[..., InferenceService]
Pod = Callable[..., dict[str, Any]]


@pytest.fixture
def pod(service: Build, settings: Settings, model: FetchedModel) -> Pod:
    """The engine's pod with this spec of the template."""

    def build(**spec: Any) -> dict[str, Any]:
        found: dict[str, Any] = engine_template(service(podTemplate={"spec": spec}), settings, model)["spec"]
        return found

    return build


def test_without_a_template_nothing_is_added(pod: Pod, service: Build, settings: Settings, model: FetchedModel) -> None:
    assert pod() == engine_template(service(), settings, model)["spec"]


def test_the_engine_keeps_what_is_its_own(pod: Pod) -> None:
    plain = pod()["containers"][0]
    mount = {"name": "v", "mountPath": "/scratch"}
    security = {"readOnlyRootFilesystem": False, "capabilities": {"add": ["NET_BIND_SERVICE"], "drop": ["CHOWN"]}}
    more = {"name": "engine", "volumeMounts": [mount], "resources": {"limits": {"rdma/hca": "3"}}}
    [engine] = pod(containers=[more | {"securityContext": security}], volumes=[{"name": "v", "emptyDir": {}}])[
        "containers"
    ]
    assert engine["volumeMounts"] == [*plain["volumeMounts"], mount]
    assert engine["resources"]["limits"] == plain["resources"]["limits"] | {"rdma/hca": "3"}
    assert engine["args"] == plain["args"]
    assert engine["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": False,
        "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
    }


def test_other_containers_stand_after_ours_within_the_profile(pod: Pod) -> None:
    found = pod(
        containers=[{"name": "proxy", "image": "p:1"}],
        initContainers=[{"name": "first", "image": "f:1", "restartPolicy": "Always"}],
        securityContext={"runAsUser": 1234},
    )
    assert [item["name"] for item in found["containers"]] == ["engine", "proxy"]
    assert [item["name"] for item in found["initContainers"]] == ["verify", "first"]
    for item in (*found["containers"], *found["initContainers"]):
        assert item["securityContext"]["allowPrivilegeEscalation"] is False
        assert item["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert found["securityContext"]["runAsUser"] == 1234
    assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_prefetch_gets_none_of_it(service: Build, settings: Settings) -> None:
    template = {"spec": {"containers": [{"name": "proxy", "image": "p:1"}], "securityContext": {"runAsUser": 5}}}
    job = prefetch_job(service(podTemplate=template), settings, "uid", 1)
    plain = prefetch_job(service(), settings, "uid", 1)
    assert job["spec"]["template"] == plain["spec"]["template"]


def test_claims_stand_in_place_of_gpus(service: Build, settings: Settings, model: FetchedModel) -> None:
    claims = [
        {"name": "gpu", "resourceClaimTemplateName": "h100", "request": "big"},
        {"name": "nic", "resourceClaimName": "shared"},
    ]
    spec = engine_template(service(resources={"claims": claims}), settings, model)["spec"]
    assert spec["resourceClaims"] == [
        {"name": "gpu", "resourceClaimTemplateName": "h100"},
        {"name": "nic", "resourceClaimName": "shared"},
    ]
    resources = spec["containers"][0]["resources"]
    assert resources["claims"] == [{"name": "gpu", "request": "big"}, {"name": "nic"}]
    assert "nvidia.com/gpu" not in resources["limits"]


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        ({}, ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]),
        ({"topologySpread": []}, []),
        ({"topologySpread": [{"topologyKey": "rack"}]}, ["rack"]),
    ],
)
def test_pods_are_spread_unless_told_otherwise(
    service: Build, settings: Settings, model: FetchedModel, placement: dict[str, Any], keys: list[str]
) -> None:
    spec = engine_template(service(placement=placement), settings, model)["spec"]
    found = spec.get("topologySpreadConstraints", [])
    assert [item["topologyKey"] for item in found] == keys
    assert all(item["whenUnsatisfiable"] == "ScheduleAnyway" for item in found)
    assert all(item["labelSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo" for item in found)
