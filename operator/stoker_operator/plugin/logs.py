"""`kubectl stoker logs`: the logs that matter now: of what keeps the service from being ready, else of what serves.

Invariants: pure choice; lines of probes and scrapes are left out, unless everything is asked for.
Knows nothing of how a log is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stoker_operator.manifests.identity import COMPONENT, WORKER
from stoker_operator.observe.rollout import is_finished, is_terminating
from stoker_operator.plugin.place import Log, ready_of

Object = Mapping[str, Any]
# While one of these is Ready's reason, the weights are what matters.
_FETCHING = frozenset(
    {
        "CreatingVolume", "Fetching", "TokenRejected", "RevisionNotFound", "ModelNotFound", "VolumeFull", "BadRequest",
        "HubUnreachable", "ChecksumMismatch", "FetchFailed", "Interrupted", "CacheCorrupt",
    }
)  # fmt: skip
_NOISE = re.compile(r'"?(GET|HEAD) /(health|ready|metrics)\b')


def choose(service: Object, pods: Sequence[Object]) -> list[Log]:
    """Which logs to read, the gravest first; none where nothing has begun."""
    newest = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    fetches = [pod for pod in newest if _part(pod) == "fetch"]
    engines = [pod for pod in newest if _part(pod) in ("engine", WORKER) and not is_finished(pod)]
    if ready_of(service)["reason"] in _FETCHING and fetches:
        return [Log(fetches[0]["metadata"]["name"], "fetch")]
    troubled = [log for pod in engines for log in _troubled(pod)]
    if troubled and ready_of(service)["status"] != "True":
        return troubled
    # Of a group the leader has the API's log; a worker's says what became of its ranks.
    going_last = sorted(engines, key=lambda pod: (is_terminating(pod), _part(pod) == WORKER))
    return [Log(pod["metadata"]["name"], "engine") for pod in going_last if _began(pod, "engine")]


def is_noise(line: str) -> bool:
    """Whether a line only tells of a probe or a scrape that was answered."""
    return _NOISE.search(line) is not None


def _troubled(pod: Object) -> list[Log]:
    """The logs of a pod's containers that ended, or keep it from starting."""
    found = []
    status = pod.get("status") or {}
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state, last = each.get("state") or {}, each.get("lastState") or {}
        if "terminated" in last and "terminated" not in state:
            found.append(Log(pod["metadata"]["name"], each["name"], previous=True))
        elif (state.get("terminated") or {}).get("exitCode"):
            found.append(Log(pod["metadata"]["name"], each["name"]))
    return found


def _began(pod: Object, container: str) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(each["name"] == container and "waiting" not in (each.get("state") or {}) for each in statuses)


def _part(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(COMPONENT, ""))
