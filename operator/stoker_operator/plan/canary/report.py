"""A canary's part of the status: what the next look goes on from, and what people read.

Invariants: pure; what is remembered here is all that is remembered of a canary.
Knows nothing of what is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator import manifests
from stoker_operator.manifests.canary import known_canary
from stoker_operator.plan.cache import CachePlan
from stoker_operator.plan.canary import words
from stoker_operator.plan.canary.stand import Stand, World, answered, stamp
from stoker_operator.spec.service import model_status


def counts(there: World) -> dict[str, Any]:
    state = there.observed.canary.rollout
    found = {"revision": state.current, "answered": answered(there)}
    counts = {"replicas": state.total, "readyReplicas": state.ready}
    return counts | {key: value for key, value in found.items() if value}


def weights(cache: CachePlan) -> dict[str, Any]:
    """What is remembered of its weights."""
    found: dict[str, Any] = {"cache": {"claim": cache.claim, "source": cache.source, "attempt": cache.attempt}}
    return found | ({"model": model_status(cache.model, cache.source)} if cache.model is not None else {})


def remembered(there: World) -> dict[str, Any]:
    known = known_canary(there.service)
    return {key: known[key] for key in ("model", "cache", "share", "weight", "answered") if key in known}


def last_figures(there: World) -> dict[str, Any]:
    """By what it was judged."""
    found = there.observed.canary.comparison
    if found is None:
        return {}
    sides = {"stable": words.figures_status(found.stable), "canary": words.figures_status(found.canary)}
    return {"comparedSince": stamp(found.since)} | sides


def judged_by(there: World) -> dict[str, Any]:
    """The figures of one that is over, for whoever looks later."""
    known = known_canary(there.service)
    return {key: known[key] for key in ("comparedSince", "stable", "canary") if key in known}


def own_keeps(there: World) -> frozenset[str]:
    cache = known_canary(there.service).get("cache") or {}
    return frozenset(str(cache[key]) for key in ("claim", "source") if cache.get(key))


def status_of(there: World, stand: Stand, more: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "key": manifests.canary_key(there.service),
        "name": stand.name,
        "state": stand.state,
        "since": stand.since,
        "step": stand.step + 1,
        "steps": len(there.canary.shares),
    }
    return found | ({"why": stand.why} if stand.why else {}) | dict(more)
