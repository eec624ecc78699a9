"""`kubectl stoker render`: every object that the operator would write for a manifest, without a cluster.

Invariants: pure: the operator's own planner runs, over and over, on a cluster in which what it asked for is there,
until it asks for nothing more. What only a cluster or a download tells (uids, the commit, the digest) is zeros.
Knows nothing of what the planner decides and of where a manifest comes from.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from stoker_operator import manifests
from stoker_operator.cluster.kinds import OPTIONAL
from stoker_operator.manifests import Manifest
from stoker_operator.observe.gpu import Gpu
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Apply
from stoker_operator.plan.plan import make_plan
from stoker_operator.plugin.errors import PluginError
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService, model_status

NO_UID = "00000000-0000-0000-0000-000000000000"
_NOW = datetime(2000, 1, 1, tzinfo=UTC)
# Each round asks for what the one before made possible; a volume, its prefetch, the pods and what follows from those.
_ROUNDS = 8


def render(service: InferenceService, settings: Settings, model: FetchedModel) -> list[Manifest]:
    """The objects, in the order in which they are written. Raises PluginError for a service that gets no pods."""
    service = replace(service, uid=NO_UID, status={})
    children: dict[tuple[str, str], dict[str, Any]] = {}
    if not manifests.owns_claim(service):
        claim = {"metadata": {"name": manifests.claim_name(service), "namespace": service.namespace}, "spec": {}}
        children["PersistentVolumeClaim", manifests.claim_name(service)] = _live(claim)
    written: list[Manifest] = []
    for _ in range(_ROUNDS):
        plan = make_plan(service, _observed(children, settings), settings, _NOW)
        fit = plan.fit
        if fit is not None and fit.blocks and service.resources.fit_check == "Enforce":
            raise PluginError(f"it would get no pods: {fit.message}")
        asked = [dict(action.manifest) for action in plan.actions if isinstance(action, Apply)]
        fresh = [item for item in asked if (item["kind"], item["metadata"]["name"]) not in children]
        if not fresh:
            return written
        written += fresh
        children |= {(item["kind"], item["metadata"]["name"]): _live(item) for item in fresh}
        if any(item["kind"] == "Job" for item in fresh):
            service = replace(service, status=_fetched(service, model))
    raise AssertionError("the planner always asks for more")


def _observed(children: Mapping[tuple[str, str], Mapping[str, Any]], settings: Settings) -> Observed:
    """A cluster with these objects, every optional kind that the settings leave, and no pod or node."""
    claims = tuple(item for (kind, _), item in children.items() if kind == "PersistentVolumeClaim")
    without = frozenset(settings.without)
    served = frozenset(kind.kind for kind in OPTIONAL) - without
    return Observed(children=children, claims=claims, served=served, without=without, gpu=Gpu("", 0.0), turn=True)


def _live(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """As the API server would give it back."""
    found = copy.deepcopy(dict(manifest))
    found["metadata"] |= {"uid": NO_UID, "resourceVersion": "1", "generation": 1}
    return found


def _fetched(service: InferenceService, model: FetchedModel) -> dict[str, Any]:
    """The status after a prefetch that brought this model."""
    return {"model": model_status(model, manifests.source_id(service, NO_UID))}
