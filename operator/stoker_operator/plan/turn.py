"""Plans how a change that nobody asked of this service reaches it: a new default image, a new operator.

Invariants: pure. Such a change waits for its turn where pods serve, and nowhere else; meanwhile the service is what its
owner asked for, hence Ready. What the owner changes never waits.
Knows nothing of who else waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.wording import listed
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]


def is_default(service: InferenceService) -> bool:
    """Whether what is to change now is none of this generation's, which has reached the Deployment before."""
    # An operator before this one noted none: what it told of, it had seen.
    same = (reached_before(service) or service.status.get("observedGeneration")) == service.generation
    return same and reached_commit(service) == service.followed.commit


def reached_commit(service: InferenceService) -> str:
    """The followed commit that reached the Deployment with that generation, "" = the first one: who follows a branch
    asked for its commits.
    """
    return str((service.status.get("revisions") or {}).get("commit", ""))


def reached_before(service: InferenceService) -> int:
    """The last generation that reached the Deployment; 0 = none, or nobody noted it."""
    return int((service.status.get("revisions") or {}).get("generation", 0))


def waits(service: InferenceService, observed: Observed) -> bool:
    """Whether a change waits for a turn, or for somebody to look whether there is one."""
    if not is_default(service) or service.suspend or service.rollout.paused or not observed.rollout.ready:
        return False
    return not observed.turn


def cause(service: InferenceService, live: Object, settings: Settings) -> str:
    """Why the pods change, for the event."""
    template = live["spec"].get("template") or live["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    containers = template["spec"]["containers"]
    images = {item["name"]: item["image"] for item in containers}
    if not service.runtime.image and images.get("engine") != settings.runtime_image:
        return f"the default runtime image is {settings.runtime_image} now"
    return "this version of the operator makes pods in another way"


def waiting_words(observed: Observed, why: str) -> str:
    """What the status says meanwhile."""
    now = f", now of {listed(observed.ahead, 'and')}" if observed.ahead else ""
    return f"A change waits for its turn: {why}. The chart's rollout.parallel lets so many services change{now}."
