"""Plans the number of pods: who sets it, the object that does, and whether it has the series it needs.

Invariants: pure. While an autoscaler owns the workload's `replicas`, the operator does not set it; until it does,
the operator holds the number that is there, inside min and max, so that taking up autoscaling or ending a suspension
never drops running pods.
Knows nothing of how the series are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator import manifests
from stoker_operator.manifests.identity import FIELD_MANAGER
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Condition
from stoker_operator.plan.endpoint import converge, not_given
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]
_KINDS = ("HorizontalPodAutoscaler", "ScaledObject")
_ADVICE = (
    "Is the chart's metricsAdapter on, or does prometheus-adapter serve this series on custom.metrics.k8s.io? "
    "See: kubectl get apiservices | grep custom.metrics.k8s.io"
)


def wanted_replicas(service: InferenceService, live: Object | None, no_pods: bool | None = None) -> int | None:
    """What the operator writes into the workload's `replicas`; None leaves it to others.

    `no_pods`: whether the service is to sleep, None = it never does.
    """
    if service.suspend or no_pods:
        return 0
    scaling = service.autoscaling
    if scaling is None or not (scaling.ours or (no_pods is False and not service.replicas)):
        return service.replicas
    if scaling.ours and service.replicas is not None:
        return service.replicas
    if live is None:
        return scaling.floor
    there = int(live["spec"].get("replicas", 1))
    if not sets_replicas(live) and (there or no_pods is None):
        return None
    return min(max(there, scaling.floor), scaling.most)


def sets_replicas(deployment: Object) -> bool:
    """Whether `replicas` is still as we last applied it: another writer who changes it becomes its owner."""
    return any(
        entry["manager"] == FIELD_MANAGER and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        for entry in deployment["metadata"].get("managedFields") or ()
    )


def scaling_actions(
    service: InferenceService, observed: Observed, settings: Settings, *, paused: bool = False
) -> list[Action]:
    """The autoscaler's object, and the end of those that are not wanted any more. `paused`: it is to rest."""
    wanted = _wanted(service, observed, settings, paused)
    listed = [(wanted, "it sets the number of pods by their queue")] if wanted is not None else []
    return converge(observed, listed, _KINDS, "spec.autoscaling does not ask for it any more")


def _wanted(
    service: InferenceService, observed: Observed, settings: Settings, paused: bool
) -> manifests.Manifest | None:
    scaling = service.autoscaling
    # Two autoscalers on one workload fight: ours comes when the workload is there and goes with the spec.
    live = observed.workload(service)
    if scaling is None or live is None:
        return None
    if scaling.engine == "HPA" and "HorizontalPodAutoscaler" not in observed.without:
        return manifests.pod_autoscaler(service, scaling, live)
    if scaling.engine == "KEDA" and "ScaledObject" in observed.served and settings.prometheus_url:
        return manifests.scaled_object(service, scaling, live, settings.prometheus_url, paused=paused)
    return None


def scaling_condition(service: InferenceService, observed: Observed, settings: Settings) -> Condition | None:
    """AutoscalingActive; None when the spec asks for no autoscaling."""
    scaling = service.autoscaling
    if scaling is None:
        return None
    if not scaling.ours:
        return _active("True", "External", "Whoever writes the scale subresource sets the number of pods.")
    if service.suspend:
        return _active("False", "Suspended", "spec.suspend is true.")
    kind = "HorizontalPodAutoscaler" if scaling.engine == "HPA" else "ScaledObject"
    if kind in observed.without:
        feature = "horizontalPodAutoscaler" if scaling.engine == "HPA" else "keda"
        return _active("False", "FeatureOff", not_given(f"{kind}s", feature))
    if scaling.engine == "KEDA" and "ScaledObject" not in observed.served:
        return _active("False", "KedaMissing", "No API serves keda.sh/v1alpha1. Install KEDA, or use engine: HPA.")
    if scaling.engine == "KEDA" and not settings.prometheus_url:
        return _active("False", "PrometheusUnknown", "Set the chart's prometheus.url, or use engine: HPA.")
    live = observed.children.get((kind, service.name))
    said = {item["type"]: item for item in (live or {}).get("status", {}).get("conditions") or ()}
    verdict = said.get("ScalingActive" if scaling.engine == "HPA" else "Ready")
    if verdict is None:
        return _active("Unknown", "Pending", f"{kind} {service.name} has not been looked at by its controller yet.")
    if verdict["status"] == "True":
        return _active("True", "SeriesFound", _follows(scaling.floor, scaling.most, said))
    if verdict.get("reason") == "ScalingDisabled":
        return _active("False", "ScaledToZero", "The workload's scale is 0, which autoscalers leave alone.")
    if not observed.rollout.ready:
        return _active("False", "NoPodReady", "No pod is ready, so none has a queue to go by.")
    message = verdict.get("message", "")
    if scaling.engine == "KEDA":
        advice = f"Does {settings.prometheus_url} answer KEDA? See: kubectl describe scaledobject {service.name}"
        return _active("False", "SeriesMissing", f"{message}. {advice}")
    own = f"The built-in adapter: {observed.metrics_api}. " if observed.metrics_api else ""
    return _active("False", "SeriesMissing", f"{message}. {own}{_ADVICE}")


def _follows(least: int, most: int, said: Mapping[str, Object]) -> str:
    text = f"The number of pods follows their queue, from {least} to {most}"
    limited = said.get("ScalingLimited", {})
    if limited.get("status") == "True":
        text += f"; {limited.get('message', '')}"
    return f"{text}."


def _active(status: str, reason: str, message: str) -> Condition:
    return Condition("AutoscalingActive", status, reason, message)


def scaling_status(service: InferenceService, observed: Observed) -> dict[str, Any]:
    """status.scaling: what the autoscaler wants; {} when none of ours does."""
    scaler = observed.children.get(("HorizontalPodAutoscaler", service.name))
    if service.autoscaling is None or scaler is None:
        return {}
    said = scaler.get("status", {})
    found = {"desired": said.get("desiredReplicas"), "lastScaleTime": said.get("lastScaleTime")}
    return {key: value for key, value in found.items() if value is not None}
