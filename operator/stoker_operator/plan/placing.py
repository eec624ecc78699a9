"""Plans where the pods of a change go: beside the old ones, or in the place of one.

Invariants: pure. A change goes beside what serves wherever it can. It takes an old pod's place only where nothing
serves, or where the scheduler lacks what that pod gives back: never for a selector, an affinity, a taint or a volume,
and without GPUs never below one pod that answers. Settled, nothing of the strategy is ever rewritten.
Knows nothing of revisions and their records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker_operator import manifests
from stoker_operator.observe.capacity import Room, takes_the_place_of
from stoker_operator.observe.rollout import is_finished, is_terminating, template_hash
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.diagnose import trouble_of
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]
# (maxSurge, maxUnavailable) of a workload.
IN_PLACE = (0, 1)
SURGE = (1, 0)


def strategy(
    service: InferenceService, observed: Observed, live: Object | None, changes: bool, template: Object
) -> tuple[int, int]:
    """(maxSurge, maxUnavailable) of the workload; `changes`: it is about to get this `template`, which is another."""
    policy = service.rollout
    if policy.strategy == "RollingUpdate":
        return policy.max_surge, policy.max_unavailable
    if service.resources.claims:
        return (
            IN_PLACE  # no node says which devices are free; a pod that waits for one beside the old would wait for ever
        )
    gpus = service.resources.on_gpu
    if live is None:
        return IN_PLACE if gpus else SURGE
    if changes:
        if not observed.rollout.ready:
            return IN_PLACE if gpus else SURGE
        room = _room(observed, template)
        return IN_PLACE if gpus and room.freed and not room.spare else SURGE
    if _waits_beside(observed):
        if not observed.rollout.ready:
            return IN_PLACE
        return IN_PLACE if _may_give_way(service, observed) and _room(observed, template).freed else SURGE
    there = manifests.rolling_update(live)
    kept = (there.get("maxSurge"), there.get("maxUnavailable"))
    return kept if kept in (SURGE, IN_PLACE) else IN_PLACE if gpus else SURGE


def asks_room(
    service: InferenceService, observed: Observed, changes: bool, template: Object
) -> Sequence[Object] | None:
    """The specs of a replica's pods, of which it matters where they could go, and nobody looked; None where it does not
    matter.
    """
    if service.rollout.strategy != "Auto" or service.suspend or observed.room is not None or service.resources.claims:
        return None
    matters = bool(service.resources.on_gpu and observed.rollout.ready) if changes else _waits_beside(observed)
    return manifests.pods_of(template) if matters else None


def _may_give_way(service: InferenceService, observed: Observed) -> bool:
    """Whether the service can do without one of the pods that serve."""
    return service.resources.on_gpu or observed.rollout.ready != 1


def _room(observed: Observed, template: Object) -> Room:
    """Where a pod could go; where nodes are none of our business, by what the pods that run are."""
    if observed.room is not None:
        return observed.room
    running = [pod.get("spec") or {} for pod in _live(observed) if pod.get("spec", {}).get("nodeName")]
    specs = manifests.pods_of(template)
    return Room(spare=False, freed=all(any(takes_the_place_of(spec, old) for old in running) for spec in specs))


def _waits_beside(observed: Observed) -> bool:
    """Whether a new pod finds no node for want of something that old ones hold, and none is on its way out yet."""
    live, current = _live(observed), observed.rollout.current
    new = [pod for pod in live if template_hash(pod) == current]
    if not current or len(new) == len(live) or observed.rollout.terminating:
        return False
    return any(trouble is not None and bool(trouble.lacking) for trouble in map(trouble_of, new))


def _live(observed: Observed) -> list[Object]:
    return [pod for pod in observed.serving_pods if not is_terminating(pod) and not is_finished(pod)]
