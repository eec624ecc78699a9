"""The Job that looks up what a followed revision stands for now (spec.model.updatePolicy: Follow).

Invariants: it asks the source as a prefetch does, with the same credentials under the same identity, and mounts no
volume with models; one try a Job, and the pause to the next one is the operator's.
Knows nothing of when one is due and of what follows from what it finds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from stoker_operator.manifests.fetching.asking import (
    JOB,
    identity_labels,
    resolving_arguments,
    resolving_pod,
)
from stoker_operator.manifests.identity import ATTEMPT_LABEL, BEGUN, Manifest, child, job_labels, short_hash, stamped
from stoker_operator.manifests.revision import TEMPLATE_KEY, template_key
from stoker_operator.settings import Settings
from stoker_operator.spec.service import GROUP, InferenceService

COMPONENT_NAME = "lookup"
FOLLOWS_LABEL = f"{GROUP}/follows"
# For a node, an image, and a hub that is slow to answer.
_DEADLINE_SECONDS = 900


def lookup_job(service: InferenceService, settings: Settings, now: datetime, failures: int = 0) -> Manifest:
    """The Job of one look that begins at `now`, after so many that failed."""
    run = short_hash([service.model.follows, now.isoformat(timespec="seconds")])
    job = child(service, JOB, f"{service.name}-lookup-{run}", COMPONENT_NAME)
    job["metadata"]["labels"] |= {FOLLOWS_LABEL: service.model.follows, ATTEMPT_LABEL: str(failures)}
    template = lookup_pod(service, settings)
    job["metadata"]["annotations"] = {TEMPLATE_KEY: template_key(template), BEGUN: now.isoformat(timespec="seconds")}
    labels = job_labels(job["metadata"]["labels"]) | identity_labels(service)
    job["spec"] = {
        "activeDeadlineSeconds": _DEADLINE_SECONDS,
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": 86400,
        "template": {"metadata": {"labels": labels}, "spec": template},
    }
    return stamped(job)


def lookup_pod(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """The spec of its pod."""
    arguments = [*resolving_arguments(service, settings, service.model.asked), "--retries", "3"]
    return resolving_pod(service, settings, COMPONENT_NAME, arguments)
