"""Why groups of pods start anew, and how often: what their own pods cannot tell, since new ones take their place.

A container that ends is not started again in its pod: the whole group is made anew, at once and without a pause that
grows. So the status remembers each group by the pod that leads it: another one tells of a restart, and what was seen of
the pods before tells why.
Invariants: pure; a group of another revision is another group; restarts are counted while each follows the one before
within ten minutes.
Knows nothing of workloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from stoker_operator.manifests import LEADER_WORKER_SET
from stoker_operator.manifests.groups.nodes import WORKER_INDEX, index_of
from stoker_operator.observe.groups import is_whole, mates
from stoker_operator.observe.rollout import is_finished, is_ready, is_terminating, template_hash
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.diagnose import Trouble, first_ending
from stoker_operator.plan.wording import listed, sentence
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]
# As long as a container must run to be no crash loop.
STEADY = timedelta(minutes=10)
# From so many restarts on a group is not expected to come up by itself.
LOOPING = 3


@dataclass(frozen=True, slots=True)
class Group:
    """One group. `leader` is the uid of the pod that leads it; `restarts` since it was steady, `restarted` when that
    was last, `why` what was seen of the pods that ended, "" = nothing. Times as Kubernetes writes them.
    """

    index: int
    revision: str
    since: str
    leader: str
    restarts: int = 0
    restarted: str = ""
    why: str = ""

    def status(self) -> dict[str, Any]:
        """As the status remembers it."""
        return {key: value for key, value in asdict(self).items() if value != ""}


def groups_of(service: InferenceService, observed: Observed, now: datetime) -> tuple[Group, ...]:
    """The groups that there are, and those that are being made anew."""
    if observed.rollout.members == 1:
        return ()
    known = {item["index"]: Group(**item) for item in service.status.get("groups") or ()}
    found = {}
    # Of two leaders, the one that goes first: the other has the last word.
    for leader in sorted(observed.engine_pods, key=is_terminating, reverse=True):
        if index_of(leader).isdigit() and not is_finished(leader):
            group = _seen(known.get(int(index_of(leader))), leader, observed, now)
            found[group.index] = known[group.index] = group
    for index, group in known.items():  # between its last pod and its next one there is nothing of a group
        if index < observed.rollout.desired and group.revision == observed.rollout.current:
            found.setdefault(index, group)
    return tuple(found[index] for index in sorted(found))


def _seen(before: Group | None, leader: Object, observed: Observed, now: datetime) -> Group:
    meta, revision, stamp = leader["metadata"], template_hash(leader), now.strftime("%Y-%m-%dT%H:%M:%SZ")
    if before is None or before.revision != revision:
        group = Group(int(index_of(leader)), revision, stamp, str(meta["uid"]))
    elif before.leader != meta["uid"]:
        loops = before.restarted and now - datetime.fromisoformat(before.restarted) < STEADY
        count = before.restarts + 1 if loops else 1
        group = replace(before, leader=str(meta["uid"]), restarts=count, restarted=stamp)
    else:
        group = before
    why = "" if _serves(leader, observed) else _why(leader, observed)
    return replace(group, why=why) if why else group


def _serves(leader: Object, observed: Observed) -> bool:
    return is_whole(leader, observed.worker_pods, observed.rollout.members)


def _why(leader: Object, observed: Observed) -> str:
    """What ended of a group, by the pods that are still to be seen; "" = nothing that shows."""
    place = (index_of(leader), template_hash(leader))
    pods = [leader, *(pod for pod in observed.worker_pods if (index_of(pod), template_hash(pod)) == place)]
    said = first_ending(pods)
    if said:
        return said
    gone = next((pod for pod in pods[1:] if is_terminating(pod)), None)
    if gone is not None and not is_terminating(leader):
        return f"pod {gone['metadata']['name']} was deleted or evicted"
    return ""


def group_trouble(groups: Iterable[Group], observed: Observed) -> Trouble | None:
    """What is wrong with groups of the current revision that are made anew: the gravest."""
    found = []
    for group in groups:
        leader = next((pod for pod in observed.engine_pods if pod["metadata"]["uid"] == group.leader), None)
        serves = leader is not None and _serves(leader, observed)
        if group.revision == observed.rollout.current and not serves and (group.restarts or _goes(leader, group)):
            found.append(group)
    worst = max(found, key=lambda group: group.restarts, default=None)
    if worst is None:
        return None
    why = worst.why or "one of its pods was deleted, evicted or lost its node"
    if worst.restarts >= LOOPING and worst.why:
        said = f"Group {worst.index} was made anew {worst.restarts} times, each within ten minutes; the last time {why}"
        return Trouble("CrashLoop", sentence(said), True)
    text = sentence(f"Group {worst.index} starts anew as a whole, because {why}")
    return Trouble("GroupRestarting", text, False)


def _goes(leader: Object | None, group: Group) -> bool:
    """Whether the group's pods are on their way out, or one of them ended, which takes the others along."""
    return leader is None or is_terminating(leader) or bool(group.why)


def waits_for(observed: Observed) -> str:
    """What groups of the current revision wait for, as a clause; "" = nothing that does not show otherwise."""
    sets = observed.of_kinds(LEADER_WORKER_SET[1])
    if not observed.serving_pods and any(not item.get("status") for _, _, item in sets):
        return ", and nobody has looked at the LeaderWorkerSet yet: see whether lws-controller-manager runs"
    lacking = []
    for leader in observed.engine_pods:
        if template_hash(leader) != observed.rollout.current or is_terminating(leader) or not index_of(leader):
            continue
        there = {index_of(pod, WORKER_INDEX): is_ready(pod) for pod in mates(leader, observed.worker_pods)}
        numbers = map(str, range(1, observed.rollout.members))
        name = leader["metadata"]["name"]
        lacking += [f"{name}-{number}" for number in numbers if not there.get(number)]
    return f", waiting for {listed(lacking[:4], 'and')} to join" if lacking else ""


def is_late(groups: Iterable[Group], revision: str, seconds: int, now: datetime) -> bool:
    """Whether a group of a revision has been on its way for longer than that, its restarts included."""
    begun = [datetime.fromisoformat(group.since) for group in groups if group.revision == revision]
    return bool(begun) and now - min(begun) > timedelta(seconds=seconds)
