"""drift.py: what counts as a difference, and what another writer may do without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.plan.drift import difference, first_difference
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
