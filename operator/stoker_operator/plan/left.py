"""Plans the end of what an earlier source needed, once the new one serves: volumes, and Jobs that filled them.

Invariants: pure. A volume that other services use stays theirs: this service only takes itself off it, so that the
last one to move on ends it. One that is to be retained for this service is left to plan/retention.py.
Knows nothing of how the new source came to serve.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from stoker_operator import manifests
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Apply, Delete
from stoker_operator.plan.cache import CachePlan
from stoker_operator.plan.follow.lookups import is_lookup
from stoker_operator.plan.jobs import delete, source_of
from stoker_operator.spec.service import InferenceService


def left_behind(
    service: InferenceService, observed: Observed, *caches: CachePlan, keeps: Container[str] = ()
) -> list[Action]:
    """What to do about the volumes and Jobs of sources that this service no longer serves, and is not about to; `keeps`
    are the names of others that its canary and its adapters need.
    """
    actions: list[Action] = []
    claims, sources = {cache.claim for cache in caches}, {cache.source for cache in caches}
    for claim in observed.claims:
        name = claim["metadata"]["name"]
        if name not in claims and name not in keeps and "deletionTimestamp" not in claim["metadata"]:
            actions += _leave(service, claim)
    for job in observed.jobs:
        if source_of(job) not in sources and source_of(job) not in keeps and not is_lookup(job):
            actions += delete(job, "what it fetched is no longer served")
    return actions


def _leave(service: InferenceService, claim: Mapping[str, Any]) -> list[Action]:
    meta = claim["metadata"]
    owners = [reference["uid"] for reference in meta.get("ownerReferences") or ()]
    if owners == [service.uid]:
        return [Delete("PersistentVolumeClaim", meta["name"], meta["uid"], "no service uses this model any more")]
    uid, retain = manifests.claim_users(claim).get(service.name, ("", 0))
    if service.uid not in owners and (uid != service.uid or retain):
        return []
    left = manifests.left_claim(service, claim)
    return [Apply(left, "this service uses another volume; others still use this one", create=False)]
