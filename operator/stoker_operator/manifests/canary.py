"""A canary's pods and its own address, and what a service is while its canary is what it serves.

Invariants: the labels of a canary's pods and of the stable ones differ, so that the selectors of Deployment,
autoscaler and disruption budget never see the other side's; the Service sees both only where the share is one of pods.
What a status says of a canary is believed for the very canary it names.
Knows nothing of when there is a canary, and of how it is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_operator.manifests.identity import COMPONENT, INSTANCE, MANAGED_BY, Manifest, child, short_hash, stamped
from stoker_operator.manifests.revision import TEMPLATE_KEY, template_key
from stoker_operator.manifests.workload import (
    DEPLOYMENT,
    OLD_REPLICA_SETS,
    QUEUE_LABEL,
    engine_template,
    startup_seconds,
)
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

COMPONENT_NAME = "canary"
SERVICE = ("v1", "Service")
# Where a canary stands, as status.canary.state says it.
STARTING, RUNNING, PASSED, PROMOTING = "Starting", "Running", "Passed", "Promoting"
PROMOTED, RETURNING, FAILED, ABORTED, IN_SPEC = "Promoted", "Returning", "Failed", "Aborted", "InSpec"
# All pods are to be the canary's.
ADOPTED = (PROMOTING, PROMOTED)
# All pods are on their way from one to the other, though nobody changed the spec.
MOVING = (PROMOTING, RETURNING)
_MOVING_GENERATION = -1


def canary_name(service: InferenceService) -> str:
    """The name of a canary's Deployment and of its Service."""
    return f"{service.name}-{COMPONENT_NAME}"


def canary_key(service: InferenceService) -> str:
    """By which its canary is told from another; "" where it has none. What the canary leaves as it is may change."""
    return short_hash(service.canary.identity) if service.canary is not None else ""


def canary_selector(service: InferenceService) -> dict[str, str]:
    """The labels that select a canary's pods."""
    return {INSTANCE: service.name, COMPONENT: COMPONENT_NAME, MANAGED_BY: "stoker"}


def known_canary(service: InferenceService) -> Mapping[str, Any]:
    """What the status says of this very canary; {} of none, and of another."""
    found = service.status.get("canary") or {}
    return found if service.canary is not None and found.get("key") == canary_key(service) else {}


def canary_runs(service: InferenceService) -> bool:
    """Whether a canary is under way, or is to be: meanwhile there are pods to compare it with."""
    return service.canary is not None and known_canary(service).get("state", STARTING) in (
        STARTING, RUNNING, PASSED, *MOVING,
    )  # fmt: skip


def as_served(service: InferenceService) -> InferenceService:
    """The service as all of its pods are to be: its canary where that is promoted, although the spec does not say so
    yet. While they are on their way, the generation is none that reached them before.
    """
    known = known_canary(service)
    state = known.get("state")
    if state not in MOVING and state not in ADOPTED:
        return service
    status = dict(service.status)
    if state in MOVING:
        status["revisions"] = {**(status.get("revisions") or {}), "generation": _MOVING_GENERATION}
    if state not in ADOPTED:
        return replace(service, status=status)
    model = known.get("model") or {}
    if state == PROMOTING and model and model.get("source") != (status.get("model") or {}).get("source"):
        status["model"], status["cache"] = model, known.get("cache") or {}
    return replace(service.as_canary, status=status)


def canary_service(service: InferenceService) -> Manifest:
    """The address of the canary alone: for a route, for scrapers, and for who wants to try it."""
    front = child(service, SERVICE, canary_name(service), COMPONENT_NAME)
    port = {"name": "http", "port": service.endpoint.port, "targetPort": "http", "protocol": "TCP"}
    spec = {"type": "ClusterIP", "selector": canary_selector(service), "ports": [port | {"appProtocol": "http"}]}
    return stamped(front | {"spec": spec})


def canary_deployment(service: InferenceService, settings: Settings, model: FetchedModel, replicas: int) -> Manifest:
    """The canary's pods. `model` is the canary's."""
    workload = child(service, DEPLOYMENT, canary_name(service), COMPONENT_NAME)
    template = _template(service, settings, model)
    workload["metadata"]["annotations"] = {TEMPLATE_KEY: template_key(template)}
    if service.placement.queue_name:
        workload["metadata"]["labels"] |= {QUEUE_LABEL: service.placement.queue_name}
    spec: dict[str, Any] = {
        "replicas": replicas,
        "revisionHistoryLimit": OLD_REPLICA_SETS,
        "progressDeadlineSeconds": service.rollout.progress_deadline or startup_seconds(settings, model) + 600,
        "selector": {"matchLabels": canary_selector(service)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": template,
    }
    return stamped(workload | {"spec": spec})


def _template(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    """What all pods will be if it is promoted, but for whose they are."""
    template = engine_template(service.as_canary, settings, model)
    template["metadata"]["labels"] |= {COMPONENT: COMPONENT_NAME}
    for spread in template["spec"].get("topologySpreadConstraints", ()):
        spread["labelSelector"] = {"matchLabels": canary_selector(service)}
    return template
