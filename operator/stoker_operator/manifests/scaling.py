"""The objects that set the number of pods: a HorizontalPodAutoscaler, or KEDA's ScaledObject.

Invariants: both target the workload; the series are the engine's own gauges under their own names, so the built-in
adapter, prometheus-adapter and Prometheus all know them; `max` always holds.
Knows nothing of who serves the series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stoker_operator.manifests.identity import Manifest, child, stamped
from stoker_operator.spec.operations import Autoscaling, ScalingRate, Targets
from stoker_operator.spec.service import InferenceService

HPA = ("autoscaling/v2", "HorizontalPodAutoscaler")
SCALED_OBJECT = ("keda.sh/v1alpha1", "ScaledObject")
QUEUED = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
KV_USED = "vllm:kv_cache_usage_perc"  # 0 to 1, the name notwithstanding


def targets_of(targets: Targets) -> Iterator[tuple[str, str, str]]:
    """(series, average wanted per pod as a quantity, the same as a decimal) of each target that is on."""
    if targets.queued:
        yield QUEUED, str(targets.queued), str(targets.queued)
    if targets.running:
        yield RUNNING, str(targets.running), str(targets.running)
    if targets.kv_percent:
        yield KV_USED, f"{targets.kv_percent * 10}m", f"{targets.kv_percent / 100:g}"


def pod_autoscaler(service: InferenceService, autoscaling: Autoscaling, live: Mapping[str, Any]) -> Manifest:
    """The HorizontalPodAutoscaler. A pod of which the API has no sample counts as idle on the way up and as full on
    the way down, so pods that load are never multiplied. `live` is the workload; of a group the leader is its one pod.
    """
    scaler = child(service, HPA, service.name, "engine")
    metrics = [
        {"type": "Pods", "pods": {"metric": {"name": series}, "target": {"type": "AverageValue", "averageValue": want}}}
        for series, want, _ in targets_of(autoscaling.targets)
    ]
    spec = {
        "scaleTargetRef": _target(live),
        "minReplicas": autoscaling.floor,
        "maxReplicas": autoscaling.most,
        "metrics": metrics,
        "behavior": _behavior(autoscaling),
    }
    return stamped(scaler | {"spec": spec})


def scaled_object(
    service: InferenceService,
    autoscaling: Autoscaling,
    live: Mapping[str, Any],
    prometheus_url: str,
    *,
    paused: bool = False,
) -> Manifest:
    """KEDA's ScaledObject on the sums that Prometheus has of the pods' gauges. `paused`: it leaves the scale alone."""
    scaled = child(service, SCALED_OBJECT, service.name, "engine")
    if service.suspend:
        # KEDA itself raises a scale of 0 to the minimum, unless it is told to pause.
        scaled["metadata"]["annotations"] = {"autoscaling.keda.sh/paused-replicas": "0"}
    elif paused:
        # Not by a number: whoever scales a sleeping service by hand wakes it, and KEDA would take that back.
        scaled["metadata"]["annotations"] = {"autoscaling.keda.sh/paused": "true"}
    pods = f'{{namespace="{service.namespace}",pod=~"{service.name}-[a-z0-9]+-[a-z0-9]+"}}'
    triggers = [
        {
            "type": "prometheus",
            "metadata": {"serverAddress": prometheus_url, "query": f"sum({series}{pods})", "threshold": want},
        }
        for series, _, want in targets_of(autoscaling.targets)
    ]
    spec = {
        "scaleTargetRef": {"name": service.name} if live["kind"] == "Deployment" else _target(live),
        "minReplicaCount": autoscaling.floor,
        "maxReplicaCount": autoscaling.most,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(autoscaling)}},
        "triggers": triggers,
    }
    return stamped(scaled | {"spec": spec})


def _target(live: Mapping[str, Any]) -> dict[str, str]:
    return {"apiVersion": live["apiVersion"], "kind": live["kind"], "name": live["metadata"]["name"]}


def _behavior(autoscaling: Autoscaling) -> dict[str, Any]:
    return {"scaleUp": _rules(autoscaling.scale_up), "scaleDown": _rules(autoscaling.scale_down)}


def _rules(rate: ScalingRate) -> dict[str, Any]:
    policy = {"type": "Pods", "value": rate.max_pods, "periodSeconds": rate.period}
    return {"stabilizationWindowSeconds": rate.stabilization, "selectPolicy": "Max", "policies": [policy]}
