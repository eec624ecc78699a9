"""The Job that hashes a model again where it lies (spec.cache.verify: Scheduled).

Invariants: it mounts the model read-only and reads nothing else: no token, no hub; it asks for no GPU and, where that
can be, for the node of the engine's pods, since most volumes are on one node at a time. Each run is a Job of its own.
Knows nothing of when one is due and of what follows from what it finds.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from stoker_operator.manifests import pod
from stoker_operator.manifests.cache import models_volume
from stoker_operator.manifests.fetching.asking import EXIT_PERMANENT, JOB, in_place_arguments
from stoker_operator.manifests.identity import (
    BEGUN,
    CACHE_LABEL,
    SOURCE_LABEL,
    Manifest,
    cache_key,
    child,
    job_labels,
    short_hash,
    source_id,
    stamped,
)
from stoker_operator.manifests.revision import TEMPLATE_KEY, template_key
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

COMPONENT_NAME = "verify"
# A Job that hashes more slowly than this hangs; the base is for a node and an image.
_SLOWEST_BYTES_PER_SECOND = 10 * 10**6
_BASE_SECONDS = 3600


def verify_job(
    service: InferenceService, settings: Settings, model: FetchedModel, volume_uid: str, now: datetime
) -> Manifest:
    """The Job of one run that begins at `now`."""
    source = source_id(service, volume_uid)
    run = short_hash([source, now.isoformat(timespec="seconds")])
    job = child(service, JOB, f"{service.name}-verify-{run}", COMPONENT_NAME)
    job["metadata"]["labels"] |= {CACHE_LABEL: cache_key(service), SOURCE_LABEL: source}
    template = verify_pod(service, settings, model)
    job["metadata"]["annotations"] = {TEMPLATE_KEY: template_key(template), BEGUN: now.isoformat(timespec="seconds")}
    job["spec"] = {
        "activeDeadlineSeconds": _BASE_SECONDS + math.ceil(model.bytes / _SLOWEST_BYTES_PER_SECOND),
        "backoffLimit": 2,
        "ttlSecondsAfterFinished": 86400,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "verify", "operator": "In", "values": [EXIT_PERMANENT]},
                },
                # A node that drains or dies says nothing about the files.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": job_labels(job["metadata"]["labels"])}, "spec": template},
    }
    return stamped(job)


def verify_pod(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    """The spec of its pods."""
    arguments = ["fetch", "--verify-only", "--path", f"{pod.MODELS}/{model.path}", "--digest", model.digest, "--full"]
    if service.in_place:
        arguments = ["fetch", *in_place_arguments(service), "--root", pod.MODELS, "--digest", model.digest]
    tmp, _ = pod.scratch("100Mi")
    container = verify_container(service, settings, arguments)
    spec = pod.base_spec(service, settings)
    placed = {"affinity": pod.beside_the_engine(service, spec.get("affinity") or {})}
    return (
        spec | placed | {"restartPolicy": "Never", "containers": [container], "volumes": [models_volume(service), tmp]}
    )


def verify_container(service: InferenceService, settings: Settings, arguments: list[str]) -> dict[str, Any]:
    """A container that runs `stoker` with `arguments` over the model; its pod has the volumes of model and /tmp."""
    return {
        "name": "verify",
        "image": pod.image(service, settings),
        "command": ["stoker"],
        "args": [*arguments, "--termination-log", pod.TERMINATION_LOG],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": dict(pod.CONTAINER_SECURITY),
        "terminationMessagePath": pod.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [pod.models_mount(read_only=True), {"name": "tmp", "mountPath": "/tmp"}],
    }
