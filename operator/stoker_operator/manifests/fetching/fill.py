"""The Job that brings a copy of a known model to one node (cache.mode: Node).

Invariants: it runs on that node or nowhere; what it brings has the digest that every other node's copy has; it asks for
no GPU, and needs none of the pods that wait for it.
Knows nothing of which nodes need one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stoker_operator.manifests import copies
from stoker_operator.manifests.fetching.asking import JOB, PROGRESS_PORT, again_arguments, fetch_job_spec, fetch_pod
from stoker_operator.manifests.identity import (
    ATTEMPT_LABEL,
    BEGUN,
    COMPONENT,
    SOURCE_LABEL,
    Manifest,
    child,
    short_hash,
    source_id,
    stamped,
)
from stoker_operator.settings import Settings
from stoker_operator.spec.quantity import quantity
from stoker_operator.spec.service import GROUP, FetchedModel, InferenceService

COMPONENT_NAME = "fill"
NODE = f"{GROUP}/node"


def fill_job(
    service: InferenceService,
    settings: Settings,
    model: FetchedModel,
    node: str,
    attempt: int,
    now: datetime,
    *,
    repair: bool = False,
) -> Manifest:
    """The Job's `attempt` (from 1) at `node`; `repair` hashes what lies there."""
    source = source_id(service, service.cache.mode)
    job = child(
        service, JOB, f"{service.name}-fill-{short_hash([source, model.digest, node])}-{attempt}", COMPONENT_NAME
    )
    job["metadata"]["labels"] |= {SOURCE_LABEL: source, ATTEMPT_LABEL: str(attempt)}
    job["metadata"]["annotations"] = {
        NODE: node,
        copies.DIGEST: model.digest,
        BEGUN: now.isoformat(timespec="seconds"),
    }
    wanted = copies.room(model)
    volume = copies.filler_volume(service, settings, source, wanted, model.digest)
    arguments = [*again_arguments(service, settings, model), "--max-bytes", str(int(quantity(wanted)))]
    arguments += [*(["--repair"] if repair else []), "--progress-port", str(PROGRESS_PORT)]
    template = fetch_pod(service, settings, volume, arguments)
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
    template = {key: value for key, value in template.items() if key != "nodeSelector"}
    template["affinity"] = {"nodeAffinity": required}
    job["spec"] = fetch_job_spec(service, job["metadata"]["labels"], template)
    return stamped(job)


def is_fill(job: Mapping[str, Any]) -> bool:
    """Whether a Job brings a copy to a node."""
    return bool((job["metadata"].get("labels") or {}).get(COMPONENT) == COMPONENT_NAME)


def node_of(job: Mapping[str, Any]) -> str:
    """The node that it is for."""
    return str((job["metadata"].get("annotations") or {}).get(NODE, ""))
