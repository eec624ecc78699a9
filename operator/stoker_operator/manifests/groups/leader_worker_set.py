"""The LeaderWorkerSet that runs groups of pods, its pod templates, and which of two workloads a revision is.

A revision's template is its pods' template. Of a replica that spans nodes it is the leader's, with the others' beside
it, under `workers`: so a revision says by itself whether it is a Deployment or a LeaderWorkerSet, and going back to one
goes back to its workload.
Invariants: as workload.py's; a group's pods carry the key of their template as a label, since its controller gives them
no hash that another can compute. A group starts and ends as a whole.
Knows nothing of how the pods find each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stoker_operator.manifests.groups.nodes import JOIN_SECONDS, arguments, group_name, secret_variable
from stoker_operator.manifests.identity import (
    COMPONENT,
    INSTANCE,
    MANAGED_BY,
    WORKER,
    Manifest,
    child,
    stamped,
)
from stoker_operator.manifests.revision import TEMPLATE_KEY, live_template_key, template_key
from stoker_operator.manifests.workload import (
    QUEUE_LABEL,
    Variant,
    deployment,
    engine_template,
    held_deployment,
    progress_seconds,
)
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

LEADER_WORKER_SET = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
WORKERS = "workers"
# A worker answers as soon as its process runs; what it waits for then is the leader's.
_WORKER_START_SECONDS = 120


def revision_template(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    """The template of the revision that the spec asks for."""
    template = engine_template(service, settings, model)
    if not service.resources.spans_nodes:
        return template
    leader = _with_engine(template, lambda engine: _leading(service, engine))
    return leader | {WORKERS: {"size": service.resources.nodes, "template": _worker_template(service, leader)}}


def group_progress_seconds(service: InferenceService, settings: Settings, model: FetchedModel) -> int:
    """How long a new revision may take until a group of it is ready, whose pods may have to wait for each other."""
    return progress_seconds(service, settings, model) + (0 if service.rollout.progress_deadline else JOIN_SECONDS)


def is_group(template: Mapping[str, Any]) -> bool:
    """Whether a revision's replicas are groups of pods."""
    return WORKERS in template


def workload_key(service: InferenceService, template: Mapping[str, Any]) -> tuple[str, str]:
    """(kind, name) of the workload that runs such a revision."""
    return (LEADER_WORKER_SET[1], group_name(service)) if is_group(template) else ("Deployment", service.name)


def pods_of(template: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The specs of one replica's pods."""
    workers = template.get(WORKERS) or {"size": 1, "template": {}}
    return [template.get("spec") or {}, *([workers["template"].get("spec") or {}] * (workers["size"] - 1))]


def workload_manifest(service: InferenceService, settings: Settings, model: FetchedModel, variant: Variant) -> Manifest:
    """The engine's pods, by the workload of their template."""
    template = variant.template or revision_template(service, settings, model)
    if not is_group(template):
        return deployment(service, settings, model, variant)
    return _leader_worker_set(service, template_key(template), _group_template(template), variant)


def held_workload(service: InferenceService, live: Mapping[str, Any], variant: Variant) -> Manifest:
    """The workload as it runs, with other `replicas`: for while there is nothing newer to roll out."""
    if live["kind"] != LEADER_WORKER_SET[1]:
        return held_deployment(service, live, variant)
    rolling = rolling_update(live)
    if variant.template is not None:
        key, templates = template_key(variant.template), _group_template(variant.template)
    else:
        key, templates = live_template_key(live), dict(live["spec"]["leaderWorkerTemplate"])
    kept = Variant(variant.replicas, rolling.get("maxSurge", 0), rolling.get("maxUnavailable", 1))
    return _leader_worker_set(service, key, templates, kept)


def rolling_update(live: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a live workload's replicas are replaced: maxSurge and maxUnavailable."""
    spec = live["spec"]
    found = spec.get("strategy") or spec.get("rolloutStrategy") or {}
    return found.get("rollingUpdate") or found.get("rollingUpdateConfiguration") or {}


def _group_template(template: Mapping[str, Any]) -> dict[str, Any]:
    key, workers = template_key(template), template[WORKERS]
    leader = {name: part for name, part in template.items() if name != WORKERS}
    return {
        "size": workers["size"],
        # What is left of a group of which a pod ended is of no use.
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": _labelled(leader, key),
        "workerTemplate": _labelled(workers["template"], key),
    }


def _leader_worker_set(service: InferenceService, key: str, templates: Mapping[str, Any], variant: Variant) -> Manifest:
    groups = child(service, LEADER_WORKER_SET, group_name(service), "engine")
    groups["metadata"]["annotations"] = {TEMPLATE_KEY: key}
    if service.placement.queue_name:
        groups["metadata"]["labels"] |= {QUEUE_LABEL: service.placement.queue_name}
    recreate = service.rollout.strategy == "Recreate"
    spec: dict[str, Any] = {
        "leaderWorkerTemplate": dict(templates),
        # The others look for the leader while it waits for them.
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {
                "maxSurge": 0 if recreate else variant.surge,
                "maxUnavailable": "100%" if recreate else variant.unavailable,
            },
        },
        "networkConfig": {"subdomainPolicy": "Shared"},
    }
    if variant.replicas is not None:
        spec["replicas"] = variant.replicas
    return stamped(groups | {"spec": spec})


def _labelled(template: Mapping[str, Any], key: str) -> dict[str, Any]:
    metadata = template.get("metadata") or {}
    return {**template, "metadata": {**metadata, "labels": {**(metadata.get("labels") or {}), TEMPLATE_KEY: key}}}


def _worker_template(service: InferenceService, leader: Mapping[str, Any]) -> dict[str, Any]:
    """The leader's template for the pods that only compute: no Service leads to them, and they are ready once they have
    joined.
    """
    template = _with_engine(leader, _working)
    spec = template["spec"]
    # Groups go to other zones; the pods of one, which talk at every step, to other nodes alone.
    mine = {INSTANCE: service.name, COMPONENT: WORKER, MANAGED_BY: "stoker"}
    apart = [
        dict(item) | {"labelSelector": {"matchLabels": mine}}
        for item in spec.pop("topologySpreadConstraints", ())
        if item["topologyKey"] == "kubernetes.io/hostname"
    ]
    spec |= {"topologySpreadConstraints": apart} if apart else {}
    metadata = leader["metadata"] | {"labels": leader["metadata"]["labels"] | {COMPONENT: WORKER}}
    return {"metadata": metadata, "spec": spec}


def _with_engine(template: Mapping[str, Any], changed: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The template with another engine's container."""
    containers = [changed(item) if item["name"] == "engine" else item for item in template["spec"]["containers"]]
    return {**template, "spec": {**template["spec"], "containers": containers}}


def _leading(service: InferenceService, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's container as one of several: it is told of the others, and may wait for them."""
    command, model, *rest = engine["args"]
    start = engine["startupProbe"]
    return {
        **engine,
        "args": [command, model, *arguments(), *rest],
        "env": [*engine["env"], secret_variable(service)],
        "startupProbe": {**start, "failureThreshold": start["failureThreshold"] + JOIN_SECONDS},
    }


def _working(engine: Mapping[str, Any]) -> dict[str, Any]:
    start = engine["startupProbe"]
    answers = {**start["httpGet"], "path": engine["livenessProbe"]["httpGet"]["path"]}
    return {**engine, "startupProbe": {**start, "httpGet": answers, "failureThreshold": _WORKER_START_SECONDS}}
