"""plan/scaling.py: who sets the number of pods, with what object, and what the condition says of the series."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stoker_operator.plan.actions import Apply, Condition, Delete
from stoker_operator.plan.scaling import wanted_replicas
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

Build = Callable[..., InferenceService]
Object = dict[str, Any]


def scaled(replicas: int, *, ours: bool) -> Object:
    manager = "stoker-operator" if ours else "kube-controller-manager"
    fields = {"manager": manager, "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    return {"metadata": {"managedFields": [fields]}, "spec": {"replicas": replicas}}


HPA = {"min": 2, "max": 4}
REPLICAS: dict[str, tuple[Object, Object | None, int | None]] = {
    "nobody asked": ({}, None, None),
    "asked": ({"replicas": 3}, scaled(1, ours=True), 3),
    "asked for none": ({"replicas": 0}, None, 0),
    "suspended": ({"replicas": 3, "suspend": True}, scaled(3, ours=True), 0),
    "suspended under an autoscaler": ({"autoscaling": HPA, "suspend": True}, scaled(3, ours=False), 0),
    "a new one starts at min": ({"autoscaling": HPA}, None, 2),
    "the autoscaler's number is left alone": ({"autoscaling": HPA}, scaled(3, ours=False), None),
    "until it sets one, what runs is held": ({"autoscaling": HPA}, scaled(3, ours=True), 3),
    "inside max": ({"autoscaling": HPA}, scaled(9, ours=True), 4),
    "resumed at min": ({"autoscaling": HPA}, scaled(0, ours=True), 2),
    "external": ({"autoscaling": {"engine": "External", "max": 4}}, scaled(3, ours=True), None),
    "external, by the scale": ({"autoscaling": {"engine": "External", "max": 4}, "replicas": 2}, None, 2),
}


@pytest.mark.parametrize("case", REPLICAS.values(), ids=REPLICAS)
def test_replicas(service: Build, case: tuple[Object, Object | None, int | None]) -> None:
    spec, live, expected = case
    assert wanted_replicas(service(**spec), live) == expected


def test_the_autoscaler_comes_with_the_deployment_and_goes_with_the_spec(world: Any) -> None:
    there = world(autoscaling=HPA).pod().answered()
    [action] = [a for a in there.plan().actions if isinstance(a, Apply) and a.manifest["kind"].endswith("Autoscaler")]
    there.children["HorizontalPodAutoscaler", "demo"] = there.live(action.manifest)
    assert not [a for a in there.plan().actions if a.event[1].startswith("Updated Horizontal")]
    there.service = replace(there.service, autoscaling=None)
    [gone] = [a for a in there.plan().actions if isinstance(a, Delete)]
    assert (gone.kind, gone.name) == ("HorizontalPodAutoscaler", "demo")


def test_keda_replaces_the_hpa(world: Any) -> None:
    there = world(autoscaling=HPA | {"engine": "KEDA"}).pod().answered()
    there.children["HorizontalPodAutoscaler", "demo"] = {"metadata": {"name": "demo", "uid": "u"}}
    there.served, there.settings = frozenset({"ScaledObject"}), Settings(prometheus_url="http://prom")
    actions = there.plan().actions
    assert [a.kind for a in actions if isinstance(a, Delete)] == ["HorizontalPodAutoscaler"]
    assert "ScaledObject" in [a.manifest["kind"] for a in actions if isinstance(a, Apply)]


def autoscaler(**conditions: tuple[str, str, str]) -> Object:
    said = [
        {"type": kind, "status": status, "reason": reason, "message": message}
        for kind, (status, reason, message) in conditions.items()
    ]
    return {
        "metadata": {"name": "demo", "uid": "u", "annotations": {}},
        "status": {"conditions": said, "desiredReplicas": 3, "lastScaleTime": "2026-01-01T00:00:00Z"},
    }


MISSING = ("False", "FailedGetPodsMetric", "unable to get metric vllm:num_requests_waiting")
CONDITIONS: dict[str, tuple[Object, Object | None, str, str, str]] = {
    # name: (spec.autoscaling, the HPA, status, reason, a part of the message)
    "not looked at yet": (HPA, None, "Unknown", "Pending", "demo has not been looked at"),
    "works": (HPA, autoscaler(ScalingActive=("True", "ValidMetricFound", "")), "True", "SeriesFound", "from 2 to 4"),
    "at max": (
        HPA,
        autoscaler(
            ScalingActive=("True", "x", ""), ScalingLimited=("True", "TooManyReplicas", "more than the maximum")
        ),
        "True",
        "SeriesFound",
        "more than the maximum",
    ),
    "no series": (HPA, autoscaler(ScalingActive=MISSING), "False", "SeriesMissing", "metricsAdapter"),
    "scaled to zero": (
        HPA,
        autoscaler(ScalingActive=("False", "ScalingDisabled", "")),
        "False",
        "ScaledToZero",
        "scale is 0",
    ),
    "no KEDA": (HPA | {"engine": "KEDA"}, None, "False", "KedaMissing", "engine: HPA"),
    "external": (HPA | {"engine": "External"}, None, "True", "External", "scale subresource"),
}


@pytest.mark.parametrize("case", CONDITIONS.values(), ids=CONDITIONS)
def test_the_condition(world: Any, case: tuple[Object, Object | None, str, str, str]) -> None:
    spec, live, status, reason, text = case
    there = world(autoscaling=spec).pod()
    if live is not None:
        there.children["HorizontalPodAutoscaler", "demo"] = live
    found = condition(there)
    assert (found.status, found.reason) == (status, reason)
    assert text in found.message
    if live is not None:
        assert there.status()["scaling"] == {"desired": 3, "lastScaleTime": "2026-01-01T00:00:00Z"}


def test_a_built_in_adapter_that_gives_way_says_so(world: Any) -> None:
    there = world(autoscaling=HPA).pod()
    there.children["HorizontalPodAutoscaler", "demo"] = autoscaler(ScalingActive=MISSING)
    there.metrics_api = "it stays off, since another adapter serves v1beta1.x (Service a/b)"
    assert "The built-in adapter: it stays off, since another adapter serves v1beta1.x" in condition(there).message


@pytest.mark.parametrize(
    ("engine", "kind", "feature"),
    [("HPA", "HorizontalPodAutoscaler", "horizontalPodAutoscaler"), ("KEDA", "ScaledObject", "keda")],
)
def test_an_autoscaler_that_the_operator_may_not_make(world: Any, engine: str, kind: str, feature: str) -> None:
    there = world(autoscaling=HPA | {"engine": engine}).pod()
    there.without, there.settings = frozenset({kind}), Settings(prometheus_url="http://prom")
    assert kind not in [a.manifest["kind"] for a in there.plan().actions if isinstance(a, Apply)]
    found = condition(there)
    assert (found.reason, f"features.{feature}" in found.message) == ("FeatureOff", True)


def test_the_condition_of_keda(world: Any) -> None:
    there = world(autoscaling=HPA | {"engine": "KEDA"}).pod()
    there.served = frozenset({"ScaledObject"})
    assert condition(there).reason == "PrometheusUnknown"
    there.settings = Settings(prometheus_url="http://prom")
    there.children["ScaledObject", "demo"] = autoscaler(Ready=("True", "ScaledObjectReady", ""))
    assert condition(there).reason == "SeriesFound"
    broken = ("False", "ScaledObjectCheckFailed", "Triggers defined in ScaledObject are not working correctly")
    there.children["ScaledObject", "demo"] = autoscaler(Ready=broken)
    found = condition(there)
    assert found.reason == "SeriesMissing"
    assert "Triggers defined in ScaledObject" in found.message
    assert "http://prom" in found.message
    assert "custom.metrics" not in found.message


def test_without_a_ready_pod_there_is_nothing_to_go_by(world: Any) -> None:
    there = world(autoscaling=HPA).pod(ready=False)
    there.children["HorizontalPodAutoscaler", "demo"] = autoscaler(ScalingActive=MISSING)
    assert condition(there).reason == "NoPodReady"


def test_load_is_not_a_rollout(world: Any) -> None:
    """Pods that the autoscaler adds load weights for minutes; the service is no less ready for it."""
    there = world(autoscaling=HPA).pod().pod().pod(ready=False).answered()
    there.children["Deployment", "demo"]["spec"]["replicas"] = 3
    ready = {item.type: item for item in there.plan().conditions}["Ready"]
    assert (ready.status, ready.reason) == ("True", "Serving")
    there.pods.pop(0)
    assert {item.type: item for item in there.plan().conditions}["Ready"].reason == "RollingOut"


def condition(there: Any) -> Condition:
    found: Condition = next(item for item in there.plan().conditions if item.type == "AutoscalingActive")
    return found
