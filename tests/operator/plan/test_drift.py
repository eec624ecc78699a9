"""drift.py: what counts as a difference, and what another writer may do without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.plan.drift import difference, first_difference, restored
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

Live = Callable[..., dict[str, Any]]


@pytest.fixture
def wanted(service: Callable[..., InferenceService], settings: Settings, model: FetchedModel) -> dict[str, Any]:
    built = service(resources={"gpus": 0, "cpu": "1000m", "memory": "2Gi"})
    return manifests.deployment(built, settings, model, first_variant(built))


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


def test_what_was_applied_is_no_difference(wanted: dict[str, Any], live: Live) -> None:
    assert difference(live(wanted), wanted) == ""


def test_what_others_add_is_no_difference(wanted: dict[str, Any], live: Live) -> None:
    there = copy.deepcopy(live(wanted))
    there["spec"]["replicas"] = 5
    there["metadata"]["annotations"]["team"] = "search"
    there["metadata"]["labels"]["cost"] = "7"
    pod_of(there)["containers"].insert(0, {"name": "sidecar", "image": "proxy"})
    pod_of(there)["volumes"].append({"name": "certs"})
    pod_of(there)["containers"][1]["env"].append({"name": "INJECTED", "value": "1"})
    pod_of(there)["dnsPolicy"] = "ClusterFirst"
    assert difference(there, wanted) == ""


def test_a_rewritten_quantity_is_no_difference(wanted: dict[str, Any], live: Live) -> None:
    there = live(wanted)
    pod_of(there)["containers"][0]["resources"]["requests"]["cpu"] = "1"
    assert difference(there, wanted) == ""


def test_a_changed_field_is_named(wanted: dict[str, Any], live: Live) -> None:
    there = live(wanted)
    pod_of(there)["containers"][0]["image"] = "evil"
    assert "spec.template.spec.containers[name=engine].image" in difference(there, wanted)


@pytest.mark.parametrize("key", ["initContainers", "volumes", "securityContext"])
def test_a_removed_field_is_a_difference(wanted: dict[str, Any], live: Live, key: str) -> None:
    there = live(wanted)
    del pod_of(there)[key]
    assert key in difference(there, wanted)


def test_a_field_we_no_longer_want_is_a_difference(
    service: Callable[..., InferenceService], settings: Settings, model: FetchedModel, live: Live
) -> None:
    before = manifests.deployment(service(replicas=3), settings, model, first_variant(service(replicas=3)))
    after = manifests.deployment(service(), settings, model, first_variant(service()))
    assert first_difference(live(before), after, "spec") != ""
    assert difference(live(before), after) == "the spec asks for something else"


def test_arguments_are_compared_in_order() -> None:
    assert first_difference({"args": ["a", "b"]}, {"args": ["b", "a"]}, "") == "args[0]"
    assert first_difference({"args": ["a", "b", "c"]}, {"args": ["a", "b"]}, "") == "args"


def test_an_empty_wish_is_met_by_absence() -> None:
    assert first_difference({}, {"lifecycle": {}, "list": [], "flag": False}, "") == ""
    assert first_difference({"x": None}, {"x": {}}, "") == ""


def test_items_that_share_a_type_are_compared_in_order() -> None:
    metrics = [{"type": "Pods", "pods": {"metric": {"name": name}}} for name in "ab"]
    assert first_difference({"m": metrics}, {"m": metrics}, "") == ""
    assert first_difference({"m": [metrics[0], metrics[0]]}, {"m": metrics}, "") == "m[1].pods.metric.name"


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set a field of a live object; a part of the path that is a number is a list's."""

    def change(item: Any) -> None:
        *parts, last = path.split(".")
        for part in parts:
            item = item[int(part)] if part.isdigit() else item.setdefault(part, {})
        if isinstance(item, list):
            item.append(value)
        else:
            item[last] = value

    return change


POD = "spec.template.spec"
ADDED: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    # name: (kind, what another writer does, the path that is put right)
    "a key in a Service's selector": ("Service", put("spec.selector.pod", "x"), "spec.selector"),
    "a port": ("Service", put("spec.ports.-", {"name": "debug", "port": 9}), "spec.ports"),
    "an address": ("Service", put("spec.externalIPs", ["10.0.0.1"]), "spec.externalIPs"),
    "a key in a policy's selector": ("NetworkPolicy", put("spec.podSelector.matchLabels.a", "b"), "spec"),
    "an expression": (
        "NetworkPolicy", put("spec.podSelector.matchExpressions.-", {"key": "a", "operator": "Exists"}), "spec"
    ),
    "whom a policy lets in": ("NetworkPolicy", put("spec.ingress.0.from", [{"podSelector": {}}]), "spec"),
    "a key in a budget's selector": ("PodDisruptionBudget", put("spec.selector.matchLabels.a", "b"), "spec.selector"),
    "a node selector": ("Deployment", put(f"{POD}.nodeSelector", {"a": "b"}), f"{POD}.nodeSelector"),
    "a variable": (
        "Deployment", put(f"{POD}.containers.0.env.-", {"name": "X"}), f"{POD}.containers[name=engine].env"
    ),
    "variables from somewhere": (
        "Deployment", put(f"{POD}.containers.0.envFrom", [{"configMapRef": {"name": "c"}}]),
        f"{POD}.containers[name=engine].envFrom",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ADDED.values(), ids=ADDED)
def test_what_is_ours_alone_is_put_right_whatever_is_added(
    world: Any, case: tuple[str, Callable[[dict[str, Any]], None], str]
) -> None:
    kind, change, path = case
    there = world().children[kind, "demo"]
    manifest = copy.deepcopy(there)
    assert restored(there, manifest) == ("", {})
    change(there)
    assert difference(there, manifest) == ""
    found, patch = restored(there, manifest)
    assert found == path
    assert merged(there, patch) == manifest


def merged(item: Any, patch: Any) -> Any:
    """RFC 7386, as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    known = item if isinstance(item, dict) else {}
    kept = {key: value for key, value in known.items() if key not in patch}
    return kept | {key: merged(known.get(key), value) for key, value in patch.items() if value is not None}


def test_what_the_api_server_fills_in_is_nobodys_addition(world: Any) -> None:
    children = world().children
    service, policy = children["Service", "demo"], children["NetworkPolicy", "demo"]
    manifests = [copy.deepcopy(item) for item in (service, policy)]
    service["spec"] |= {"clusterIP": "10.0.0.9", "clusterIPs": ["10.0.0.9"], "sessionAffinity": "None"}
    service["spec"]["ports"][0]["nodePort"] = 31000
    del policy["spec"]["egress"]
    assert [restored(*pair)[0] for pair in zip((service, policy), manifests, strict=True)] == ["", ""]


def test_a_mapping_of_any_class_is_compared(wanted: dict[str, Any], live: Live) -> None:
    there = live(wanted)
    spec = MappingProxyType(wanted["spec"])
    assert first_difference(there, {"spec": spec}, "") == ""
    there["spec"] = MappingProxyType(there["spec"] | {"paused": True, "minReadySeconds": 3})
    assert first_difference(there, {"spec": spec}, "") == "spec.paused"
    assert first_difference({"spec": [1]}, {"spec": spec}, "") == "spec"
