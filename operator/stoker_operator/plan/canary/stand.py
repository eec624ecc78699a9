"""Where a canary stands, and what of the cluster a decision on it looks at.

Invariants: pure; a stand is what the status said of this very canary, or the beginning.
Knows nothing of what is to follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime

from stoker_operator import manifests
from stoker_operator.manifests.canary import IN_SPEC, STARTING, known_canary
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Finding
from stoker_operator.plan.cache import CachePlan
from stoker_operator.settings import Settings
from stoker_operator.spec.canary import Canary
from stoker_operator.spec.service import InferenceService


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a canary stands. `name` is this trial's own; `step` counts from 0; `why` explains the state."""

    name: str
    state: str
    since: str
    step: int = 0
    why: str = ""

    def to(self, state: str, now: datetime, why: str = "") -> Stand:
        """The same trial in another state, from now on."""
        return replace(self, state=state, since=stamp(now), why=why)


@dataclass(frozen=True, slots=True)
class Stable:
    """What the plan of the stable pods says: the `cache`; `blocking`, None = they are rolled out and answer; `failed`,
    the revision that was given up, "" = none.
    """

    cache: CachePlan
    blocking: Finding | None
    failed: str


@dataclass(frozen=True, slots=True)
class World:
    """What every step of a decision looks at."""

    service: InferenceService
    canary: Canary
    observed: Observed
    settings: Settings
    stable: Stable
    now: datetime


def stand_of(there: World) -> Stand:
    """Where the status says that it stands; at the beginning, where it says nothing of this canary."""
    known = known_canary(there.service)
    if known:
        step = max(int(known.get("step", 1)) - 1, 0)
        last = len(there.canary.shares) - 1
        name, state, since = (str(known.get(key, "")) for key in ("name", "state", "since"))
        found = Stand(name, state, since, min(step, last), str(known.get("why", "")))
        if found.state != IN_SPEC or there.canary.same:
            return found
    return Stand(f"{manifests.canary_key(there.service)}-{int(there.now.timestamp())}", STARTING, stamp(there.now))


def by_route(there: World) -> bool:
    """Whether an HTTPRoute shares requests out; else the number of pods does."""
    return there.service.endpoint.http_route is not None and "HTTPRoute" in there.observed.served


def weight_of(there: World, stand: Stand) -> int:
    return there.canary.shares[stand.step]


def pods_wanted(there: World, stand: Stand) -> int:
    """How many pods it has: of a route's share, as many as carry it; else as many as make the share, at least one and
    never more than the stable revision has.
    """
    stable, weight = max(there.observed.rollout.desired, 1), weight_of(there, stand)
    if by_route(there):
        return max(1, math.ceil(stable * weight / 100))
    return max(1, min(stable, stable * weight // (100 - weight)))


def answered(there: World) -> str:
    """The revision of the canary of which a pod answered a completion; "" = none."""
    answer = there.observed.canary.answer
    if answer is not None and not answer.error:
        return answer.template_hash
    return str(known_canary(there.service).get("answered", ""))


def is_open(there: World) -> bool:
    """Whether clients may be led to it: some pod is ready, and one answered."""
    state = there.observed.canary.rollout
    return bool(state.ready and state.current and answered(there) == state.current)


def share_of(there: World, stand: Stand) -> int:
    """The share that it has, in percent."""
    if not is_open(there):
        return 0
    if by_route(there):
        return weight_of(there, stand)
    mine, others = there.observed.canary.rollout.ready, there.observed.rollout.ready
    return round(100 * mine / (mine + others))


def stamp(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
