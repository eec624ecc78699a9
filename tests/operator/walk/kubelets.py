"""What the scheduler and the kubelets of a walk's nodes say of a pod, given its own spec and what may befall it.

Invariants: a pod does what its own spec lets it do (an image that is there, a node that would take it), never what a
test hopes for.
Knows nothing of how the operator decides, and of the API server.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tests.operator.reconcile.kubelet import REPORT
from tests.operator.walk.grouped import CRASHES, SIZE

from stoker_operator.observe.rollout import is_finished, is_ready
from stoker_operator.spec.quantity import quantity

Object = Mapping[str, Any]
UP, FROZEN, LOST = "up", "frozen", "lost"
GPU = "nvidia.com/gpu"
AMOUNTS = {"cpu": "64", "memory": "64Gi", "pods": "110", GPU: "1"}
# How an engine that does not come up says so.
_WAITING = {
    "crash": ("CrashLoopBackOff", "back-off restarting failed container", {"exitCode": 1, "message": "no such layer"}),
    "memory": ("CrashLoopBackOff", "back-off restarting failed container", {"exitCode": 137, "reason": "OOMKilled"}),
    "secret": ("CreateContainerConfigError", 'secret "nowhere" not found', None),
}
FATES = ("", "slow", *_WAITING)


@dataclass
class Kubelets:
    """`nodes` by what they are; `fate` befalls pods that are not ready yet, `fates` single ones by their uid: crash,
    unready, evicted; `fetch_fails` is the reason that fetches end with. Files of the volume may be `rotten`, with their
    size and time, and `damaged`, which every pod sees that starts. `slow_ends`: pods on their way out stay there.
    `alone` are, by their uid, those that lead a group of which others do not compute.
    """

    labels: Mapping[str, str]
    network: int
    nodes: dict[str, str]
    fate: str = ""
    fates: dict[str, str] = field(default_factory=dict)
    fetch_fails: str = ""
    rotten: bool = False
    damaged: bool = False
    slow_ends: bool = False
    alone: set[str] = field(default_factory=set)
    _addresses: int = 0
    _crashed: set[str] = field(default_factory=set)

    def mend(self) -> None:
        """All is well again; what rotted on the disk stays."""
        self.nodes = dict.fromkeys(self.nodes, UP)
        self.fates.clear()
        self._crashed.clear()
        self.fate, self.fetch_fails, self.slow_ends = "", "", False

    def hangs(self, pod: Object) -> bool:
        """Whether nothing answers at its address, whatever is said of it."""
        return self.nodes.get(pod["spec"].get("nodeName", ""), UP) != UP

    def place(self, pod: Object, pods: Iterable[Object]) -> tuple[str, str]:
        """(the node that takes it, "") or ("", what the scheduler says); `pods` are all that there are."""
        wanted = pod["spec"].get("nodeSelector") or {}
        found: dict[str, int] = {}
        for name, state in self.nodes.items():
            held = [other for other in pods if other["spec"].get("nodeName") == name and not is_finished(other)]
            if state == LOST:
                lacks = "node(s) had untolerated taint {node.kubernetes.io/unreachable: }"
            elif not wanted.items() <= {**self.labels, "node": name}.items():
                lacks = "node(s) didn't match Pod's node affinity/selector"
            else:
                lacks = next((f"Insufficient {what}" for what in ("memory", GPU) if not _fits(what, pod, held)), "")
            if not lacks:
                return name, ""
            found[lacks] = found.get(lacks, 0) + 1
        said = ", ".join(f"{count} {lacks}" for lacks, count in sorted(found.items()))
        return "", f"0/{len(self.nodes)} nodes are available: {said}."

    def status(self, pod: Object, now: datetime) -> dict[str, Any] | None:
        """What the kubelet of a pod's node says of it now; None while there is nothing new."""
        spec, known, uid = pod["spec"], pod.get("status", {}), pod["metadata"]["uid"]
        if is_finished(pod) or (self.nodes[spec["nodeName"]] == FROZEN):
            return None
        fate = self.fates.get(uid, "unready" if uid in self.alone and is_ready(pod) else "")
        if self.nodes[spec["nodeName"]] == LOST:
            return self._running(pod, ready=False, containers_ready=True) if is_ready(pod) else None
        if fate == "evicted":
            return {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
        container = spec["containers"][0]
        status = {"name": container["name"], "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        if is_ready(pod):
            return self._running(pod, ready=False, containers_ready=False) if fate == "unready" else None
        if "nowhere" in container["image"]:
            status["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
            return {"phase": "Pending", "containerStatuses": [status]}
        if container["name"] == "fetch":
            if "--repair" in container["args"] and not self.fetch_fails:
                self.rotten = self.damaged = False
            return _ended(status, self.fetch_fails, now)
        if container["name"] == "verify":
            return _ended(status, "ChecksumMismatch" if self.rotten or self.damaged else "", now)
        if self.damaged and not known.get("podIP") and self._may_crash(pod):
            return _refused_by_verify(status, now)
        return self._engine(pod, status, fate, now)

    def _engine(self, pod: Object, status: dict[str, Any], fate: str, now: datetime) -> dict[str, Any]:
        if self.fate in _WAITING and self._may_crash(pod):
            reason, message, ended = _WAITING[self.fate]
            status |= {"restartCount": 3, "state": {"waiting": {"reason": reason, "message": message}}}
            if ended is not None:
                times = {"startedAt": _stamp(now - timedelta(seconds=5)), "finishedAt": _stamp(now)}
                status["lastState"] = {"terminated": ended | times}
            else:
                status["restartCount"] = 0
            return {"phase": "Pending" if ended is None else "Running", "containerStatuses": [status]}
        up = not self.fate and not fate and pod["metadata"]["uid"] not in self.alone
        return self._running(pod, ready=up, containers_ready=up, since="2026-01-03" if up or fate else "2026-01-01")

    def _may_crash(self, pod: Object) -> bool:
        """Whether a crash of it leads to rest: a group is made anew for ever, at once, so it is let to for a while."""
        grouped, uid = SIZE in (pod["metadata"].get("annotations") or {}), pod["metadata"]["uid"]
        if grouped and len(self._crashed) < CRASHES:
            self._crashed.add(uid)
        return not grouped or uid in self._crashed

    def _running(
        self, pod: Object, *, ready: bool, containers_ready: bool, since: str = "2026-01-03"
    ) -> dict[str, Any]:
        address = pod.get("status", {}).get("podIP") or self._address()
        said = {"type": "Ready", "status": str(ready), "lastTransitionTime": f"{since}T00:00:00Z"}
        state = {"running": {"startedAt": "2026-01-02T00:00:00Z"}}
        name = pod["spec"]["containers"][0]["name"]
        status = {"name": name, "image": "i", "imageID": "", "ready": containers_ready, "restartCount": 0}
        status["state"] = state
        running = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [said]}
        return running | {"containerStatuses": [status]}

    def _address(self) -> str:
        self._addresses += 1
        return f"127.{self.network}.{self._addresses // 250}.{self._addresses % 250 + 1}"


def holds(known: Any, wanted: Any) -> bool:
    """Whether a status says what is wanted, and perhaps more."""
    if isinstance(wanted, dict):
        return isinstance(known, dict) and all(holds(known.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(known, list) and all(any(holds(item, each) for item in known) for each in wanted)
    return bool(known == wanted)


def _fits(what: str, pod: Object, held: Iterable[Object]) -> bool:
    return bool(sum(_asks(what, other) for other in held) + _asks(what, pod) <= quantity(AMOUNTS[what]))


def _asks(what: str, pod: Object) -> Any:
    resources = pod["spec"]["containers"][0].get("resources") or {}
    asked = (resources.get("limits") or {}) | (resources.get("requests") or {})
    return quantity(str(asked.get(what, "0")))


def _ended(status: dict[str, Any], failure: str, now: datetime) -> dict[str, Any]:
    said = {"reason": failure, "message": "as played"} if failure else REPORT
    ended = {"exitCode": 3 if failure else 0, "message": json.dumps(said), "finishedAt": _stamp(now)}
    status["state"] = {"terminated": ended}
    return {"phase": "Failed" if failure else "Succeeded", "containerStatuses": [status]}


def _refused_by_verify(status: dict[str, Any], now: datetime) -> dict[str, Any]:
    """The init container of an engine found other files than were published."""
    said = {"reason": "ChecksumMismatch", "message": "as played"}
    ended = {"exitCode": 3, "message": json.dumps(said), "finishedAt": _stamp(now)}
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}
    found = status | {"name": "verify", "restartCount": 2, "state": {"waiting": waiting}}
    found["lastState"] = {"terminated": ended}
    status["state"] = {"waiting": {"reason": "PodInitializing"}}
    return {"phase": "Pending", "initContainerStatuses": [found], "containerStatuses": [status]}


def _stamp(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
