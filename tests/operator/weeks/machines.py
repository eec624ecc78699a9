"""Nodes that come, go, hang and lose GPUs, with the scheduler and the kubelets: what becomes of each pod, and when.

Invariants: a node never runs more than it has; a pod does what its own spec lets it do: an engine told `--seed` 7, 14,
21 … crashes, an image of `nowhere` is never pulled. A pod on its way out holds its GPU until it is gone.
Knows nothing of how the operator decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tests.operator.weeks.store import Store, is_going

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Object
from stoker_operator.manifests.identity import short_hash
from stoker_operator.observe.rollout import is_finished, is_ready

GPU = "nvidia.com/gpu"
START_SECONDS, END_SECONDS, FETCH_SECONDS, LOOKUP_SECONDS = 40, 8, 25, 4
# As the scheduler, of a pod that found no node: it tries it again once something changed, but not before so long.
FIRST_BACKOFF, LONGEST_BACKOFF = 1, 10
# As the node controller: silent so long, a node is unreachable; so long after that, its pods are evicted.
UNREACHABLE_SECONDS, EVICTED_SECONDS = 40, 340
UP, HANGS = "up", "hangs"


@dataclass
class Machine:
    """`gpus` that work. `state`: UP, or HANGS since `since`: its kubelet says nothing any more, its pods are silent."""

    gpus: int
    state: str = UP
    since: datetime | None = None
    cordoned: bool = False
    broken: int = 0


@dataclass(frozen=True)
class Attempt:
    """How often the scheduler found no node for a pod, what the nodes were the last time, and until when it waits."""

    count: int
    nodes: tuple[tuple[str, str, bool, int], ...]
    again: datetime


@dataclass
class Machines:
    """`heads` says at which commit each source is, `fetch_fails` how fetches end; `held` has what was fetched to each
    volume, by its uid and the digest, `known` what a digest is: a source and a commit of it. `struck` are engines that
    broke by themselves, until they start anew.
    """

    store: Store
    clock: Callable[[], datetime]
    nodes: dict[str, Machine] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    fetch_fails: str = ""
    held: set[tuple[str, str]] = field(default_factory=set)
    known: dict[str, tuple[str, str]] = field(default_factory=dict)
    struck: dict[str, datetime] = field(default_factory=dict)
    _since: dict[str, datetime] = field(default_factory=dict)
    _addresses: dict[str, str] = field(default_factory=dict)
    _tried: dict[str, Attempt] = field(default_factory=dict)

    def add(self, name: str, gpus: int) -> None:
        """A node joins."""
        self.nodes[name] = Machine(gpus)
        self._tell(name)

    def leave(self, name: str) -> None:
        """A node is taken out of the cluster; its pods are collected."""
        del self.nodes[name]
        node = self.store.find(kinds.NODE, name, "")
        assert node is not None
        self.store.forget(node)
        for pod in self.on(name):
            self.store.forget(pod)

    def hang(self, name: str) -> None:
        """Its kubelet falls silent."""
        machine = self.nodes[name]
        if machine.state == UP:
            machine.state, machine.since = HANGS, self.clock()

    def come_back(self, name: str) -> None:
        """It reports again, its GPUs work, and it takes pods."""
        self.nodes[name] = Machine(self.nodes[name].gpus + self.nodes[name].broken)
        for pod in self.on(name):
            self._since[pod["metadata"]["uid"]] = self.clock()
        self._tell(name)

    def break_gpu(self, name: str) -> None:
        """One of its GPUs fails, and with it the engine that has it."""
        machine = self.nodes[name]
        if machine.gpus:
            machine.gpus, machine.broken = machine.gpus - 1, machine.broken + 1
            over = self._gpus(name) - machine.gpus
            victims = [pod for pod in self.on(name) if gpus_of(pod) and not is_finished(pod) and not is_going(pod)]
            if over > 0 and victims:
                self.fail(victims[0], "UnexpectedAdmissionError", "a device plugin's device is unhealthy")
            self._tell(name)

    def on(self, name: str) -> list[Object]:
        """The pods of a node."""
        return [pod for pod in self.store.of(kinds.POD) if pod["spec"].get("nodeName") == name]

    def answers(self, pod: Object) -> bool:
        """Whether somebody who asks this pod gets an answer."""
        machine = self.nodes.get(pod["spec"].get("nodeName", ""))
        struck = pod["metadata"]["uid"] in self.struck
        return machine is not None and machine.state == UP and is_ready(pod) and not is_finished(pod) and not struck

    def fail(self, pod: Object, reason: str, message: str) -> None:
        """A pod is over, for a reason of its node's."""
        ended = {"phase": "Failed", "reason": reason, "message": message, "ended": self.store.stamp()}
        self.store.say(pod, **ended, conditions=[], containerStatuses=[])

    def due(self) -> list[datetime]:
        """When time alone changes something."""
        found = []
        for machine in self.nodes.values():
            if machine.since is not None:
                found += [machine.since + timedelta(seconds=s) for s in (UNREACHABLE_SECONDS, EVICTED_SECONDS)]
        seconds = (END_SECONDS, LOOKUP_SECONDS, FETCH_SECONDS, START_SECONDS, 2 * START_SECONDS)
        found += [at + timedelta(seconds=each) for at in self._since.values() for each in seconds]
        return found + [attempt.again for attempt in self._tried.values()]

    def sync(self) -> None:
        """Place pods, and let each come as far as it would be by now."""
        now, there = self.clock(), set()
        for name, machine in self.nodes.items():
            if machine.since is not None:
                self._watch(name, machine, now)
        for pod in self.store.of(kinds.POD):
            there.add(pod["metadata"]["uid"])
            if not pod["spec"].get("nodeName"):
                self._place(pod)
            else:
                self._live(pod, now)
        for gone in self._since.keys() - there:
            del self._since[gone]
        for gone in self._tried.keys() - there:
            del self._tried[gone]

    def _watch(self, name: str, machine: Machine, now: datetime) -> None:
        """The node controller's part about a node that is silent."""
        assert machine.since is not None
        silent = (now - machine.since).total_seconds()
        if silent < UNREACHABLE_SECONDS:
            return
        self._tell(name, ready=False)
        for pod in self.on(name):
            if is_ready(pod):
                self.store.say(pod, conditions=[_condition("Ready", "False", self.store.stamp())])
            if silent >= EVICTED_SECONDS and not is_going(pod):
                self.store.remove(pod)

    def _tell(self, name: str, *, ready: bool = True) -> None:
        """What the Node object says."""
        machine = self.nodes[name]
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: str(machine.gpus)}
        status = {"allocatable": amounts, "conditions": [{"type": "Ready", "status": str(ready)}]}
        taints = [] if ready else [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]
        spec = {"unschedulable": machine.cordoned, "taints": taints}
        live = self.store.find(kinds.NODE, name, "")
        if live is None:
            live = self.store.add({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}})
        if live["spec"] != spec or live.get("status") != status:
            self.store.put({**live, "spec": spec, "status": status})

    def cordon(self, name: str) -> None:
        """No new pods there."""
        self.nodes[name].cordoned = True
        self._tell(name)

    def _gpus(self, name: str) -> int:
        return sum(gpus_of(pod) for pod in self.on(name) if not is_finished(pod))

    def _place(self, pod: Object) -> None:
        if is_finished(pod):
            return
        for claim in _claims(pod):
            if self.store.find(kinds.CLAIM, claim) is None:
                self._say_unplaced(pod, f'persistentvolumeclaim "{claim}" not found')
                return
        uid, lacking = pod["metadata"]["uid"], dict[str, int]()
        state = tuple((name, it.state, it.cordoned, it.gpus - self._gpus(name)) for name, it in self.nodes.items())
        tried = self._tried.get(uid, Attempt(0, (), self.clock()))
        if tried.nodes == state or self.clock() < tried.again:
            return
        for name, machine in sorted(self.nodes.items()):
            if machine.state != UP:
                lacks = "node(s) had untolerated taint {node.kubernetes.io/unreachable: }"
            elif machine.cordoned:
                lacks = "node(s) were unschedulable"
            elif self._gpus(name) + gpus_of(pod) > machine.gpus:
                lacks = f"Insufficient {GPU}"
            else:
                self.store.put({**pod, "spec": {**pod["spec"], "nodeName": name}, "status": {"phase": "Pending"}})
                self._since[uid] = self.clock()
                self._tried.pop(uid, None)
                return
            lacking[lacks] = lacking.get(lacks, 0) + 1
        wait = timedelta(seconds=min(FIRST_BACKOFF * 2**tried.count, LONGEST_BACKOFF))
        self._tried[uid] = Attempt(tried.count + 1, state, self.clock() + wait)
        said = ", ".join(f"{count} {lacks}" for lacks, count in sorted(lacking.items()))
        self._say_unplaced(pod, f"0/{len(self.nodes)} nodes are available: {said}.")

    def _say_unplaced(self, pod: Object, text: str) -> None:
        said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
        self.store.say(pod, conditions=[said])

    def _live(self, pod: Object, now: datetime) -> None:
        machine, meta = self.nodes.get(pod["spec"]["nodeName"]), pod["metadata"]
        if machine is None or machine.state != UP:
            return
        if is_going(pod):
            gone = datetime.fromisoformat(meta["deletionTimestamp"]) + timedelta(seconds=END_SECONDS)
            if now >= gone:
                self.store.forget(pod)
            else:
                self._since[meta["uid"]] = gone - timedelta(seconds=END_SECONDS)
            return
        if is_finished(pod):
            return
        age = (now - self._since.setdefault(meta["uid"], now)).total_seconds()
        name = pod["spec"]["containers"][0]["name"]
        if name == "engine":
            self._engine(pod, age, now)
        elif name == "lookup" and age >= LOOKUP_SECONDS:
            uri, revision = _argument(pod, "--uri"), _argument(pod, "--revision")
            self._end(pod, name, self.fetch_fails, self.report(uri, self._commit(uri, revision)))
        elif name in ("fetch", "verify") and age >= FETCH_SECONDS:
            uri, revision = _argument(pod, "--uri"), _argument(pod, "--revision")
            commit = self._commit(uri, revision)
            report = self.report(uri, commit)
            if not self.fetch_fails and name == "fetch":
                self.known[report["path"]] = (uri, commit)
                self.held |= {(self._volume(pod), report["path"])}
            self._end(pod, name, self.fetch_fails, report)
        elif name == "fetch" and "podIP" not in pod["status"]:
            self.store.say(pod, phase="Running", podIP=self._address(pod))

    def _commit(self, uri: str, revision: str) -> str:
        if uri in self.heads and revision == "main":
            return short_hash([uri, self.heads[uri]], 40)
        return revision if revision != "main" else short_hash([uri], 40)

    def report(self, uri: str, commit: str) -> Object:
        """What is told of a published source."""
        digest = short_hash([uri, commit], 64)
        return {"resolvedRevision": commit, "digest": f"sha256:{digest}", "bytes": 10**8,
                "path": f"sha256-{digest}", "serve": f"sha256-{digest}"}  # fmt: skip

    def _end(self, pod: Object, name: str, failure: str, report: Object) -> None:
        said = {"reason": failure, "message": "as played"} if failure else report
        code = 0 if not failure else 3 if failure in ("TokenRejected", "VolumeFull") else 1
        stamp = self.store.stamp()
        ended = {"exitCode": code, "message": json.dumps(said), "finishedAt": stamp}
        container = {"name": name, "image": "i", "ready": False, "restartCount": 0, "state": {"terminated": ended}}
        phase = "Failed" if failure else "Succeeded"
        self.store.say(pod, phase=phase, containerStatuses=[container], ended=stamp)

    def _engine(self, pod: Object, age: float, now: datetime) -> None:
        uid, container = pod["metadata"]["uid"], pod["spec"]["containers"][0]
        status: dict[str, Any] = {"name": "engine", "image": container["image"], "ready": False, "restartCount": 0}
        stamp = self.store.stamp()
        if "nowhere" in container["image"]:
            status["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
            self.store.say(pod, phase="Pending", containerStatuses=[status])
            return
        begun = self._since[uid].strftime("%Y-%m-%dT%H:%M:%SZ")
        if uid in self.struck and is_ready(pod):
            # It ended, and starts again.
            self._since[uid], ended = now, {"exitCode": 139, "startedAt": begun, "finishedAt": stamp}
            status |= {"restartCount": 1, "state": {"waiting": {"reason": "PodInitializing"}}}
            status["lastState"] = {"terminated": ended}
            said = [_condition("Ready", "False", stamp)]
            self.store.say(pod, phase="Running", containerStatuses=[status], conditions=said)
            return
        if is_ready(pod) or age < START_SECONDS:
            return
        if seed_of(pod) % 7 == 0:
            times = {"exitCode": 1, "startedAt": begun, "finishedAt": begun, "message": "no such layer"}
            status |= {"restartCount": 3, "lastState": {"terminated": times}}
            status["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
            self.store.say(pod, phase="Running", containerStatuses=[status], podIP=self._address(pod))
            return
        assert (self._volume(pod), path_of(pod)) in self.held, f"{pod['metadata']['name']} serves what nobody fetched"
        self.struck.pop(uid, None)
        known = (pod["status"].get("containerStatuses") or [{}])[0]
        status |= {
            "ready": True,
            "restartCount": known.get("restartCount", 0),
            "state": {"running": {"startedAt": begun}},
        }
        conditions = [_condition("Ready", "True", stamp)]
        running = {"phase": "Running", "podIP": self._address(pod), "containerStatuses": [status]}
        self.store.say(pod, **running, conditions=conditions)

    def _volume(self, pod: Object) -> str:
        claim = self.store.find(kinds.CLAIM, _claims(pod)[0])
        return str(claim["metadata"]["uid"]) if claim is not None else ""

    def _address(self, pod: Object) -> str:
        uid = pod["metadata"]["uid"]
        number = int(uid[1:])
        self._addresses[f"10.0.{number // 250}.{number % 250 + 1}"] = uid
        return f"10.0.{number // 250}.{number % 250 + 1}"

    def at(self, address: str) -> Object | None:
        """The pod that has this address."""
        uid = self._addresses.get(address)
        return next((pod for pod in self.store.of(kinds.POD) if pod["metadata"]["uid"] == uid), None)


def seed_of(pod: Object) -> int:
    """By which the engines of a walk are told apart."""
    return int(_argument(pod, "--seed") or "0")


def _argument(pod: Object, flag: str) -> str:
    arguments = pod["spec"]["containers"][0].get("args") or []
    return str(arguments[arguments.index(flag) + 1]) if flag in arguments else ""


def path_of(pod: Object) -> str:
    """The folder that an engine serves."""
    return str(pod["spec"]["containers"][0]["args"][1]).rpartition("/")[2]


def _claims(pod: Object) -> list[str]:
    volumes = (volume.get("persistentVolumeClaim") or {} for volume in pod["spec"].get("volumes") or ())
    return [str(claim["claimName"]) for claim in volumes if claim]


def gpus_of(pod: Object) -> int:
    """How many GPUs a pod holds or asks for."""
    limits = (pod["spec"]["containers"][0].get("resources") or {}).get("limits") or {}
    return int(limits.get(GPU, "0"))


def _condition(kind: str, status: str, since: str) -> dict[str, str]:
    return {"type": kind, "status": status, "lastTransitionTime": since}
