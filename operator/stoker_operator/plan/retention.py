"""Plans the end of the cache volumes that outlived their last use by as long as their services asked
(spec.cache.retain).

A volume that nobody wants retained is owned by its services, and Kubernetes ends it with the last of them. One that is
to be retained has no owner: here it is noted when nothing uses it any more, and deleted when its time is over.
Invariants: pure; used is what a service names, what a Deployment's template mounts (a rollback's too) and
what a live pod mounts; only claims that carry a wish to be retained are ever touched.
Knows nothing of what is on a volume, and of how a plan is carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from stoker_operator.manifests import claim_name, retain_seconds
from stoker_operator.observe.rollout import is_finished
from stoker_operator.spec.service import GROUP, SpecError, parse

Object = Mapping[str, Any]
UNUSED_SINCE = f"{GROUP}/unused-since"
_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class Note:
    """Write on `claim` since when nothing uses it; "" = something does again."""

    claim: Object
    since: str


@dataclass(frozen=True, slots=True)
class End:
    """Delete `claim`."""

    claim: Object
    reason: str


def claims_in_use(services: Iterable[Object], deployments: Iterable[Object], pods: Iterable[Object]) -> set[str]:
    """The names of the claims of one namespace that something uses."""
    used: set[str] = set()
    for item in services:
        if "deletionTimestamp" in item["metadata"]:
            continue
        used.add(str((item.get("status", {}).get("cache") or {}).get("claim", "")))
        try:
            service = parse(item)
            used |= {claim_name(service), claim_name(service.at(service.followed.found or service.followed.commit))}
        except SpecError:
            continue  # what it used before its spec went wrong is in its status
    for deployment in deployments:
        used |= mounted_claims(deployment["spec"]["template"]["spec"])
    for pod in pods:
        if not is_finished(pod):
            used |= mounted_claims(pod["spec"])
    return used


def mounted_claims(spec: Object) -> set[str]:
    """The names of the claims that pods of this spec mount."""
    volumes = (volume.get("persistentVolumeClaim") or {} for volume in spec.get("volumes") or ())
    return {str(claim["claimName"]) for claim in volumes if claim}


def plan_retention(claims: Iterable[Object], used: set[str], now: datetime) -> list[Note | End]:
    """What to do about the cache claims of one namespace."""
    todo: list[Note | End] = []
    for claim in claims:
        meta, seconds = claim["metadata"], retain_seconds(claim)
        if not seconds or meta.get("ownerReferences") or "deletionTimestamp" in meta:
            continue
        since = str((meta.get("annotations") or {}).get(UNUSED_SINCE, ""))
        if meta["name"] in used:
            todo += [Note(claim, "")] if since else []
        elif not since:
            todo.append(Note(claim, now.strftime(_FORMAT)))
        elif now >= datetime.fromisoformat(since) + timedelta(seconds=seconds):
            todo.append(End(claim, f"nothing has used it since {since}, and it was to be retained for {seconds} s"))
    return todo
