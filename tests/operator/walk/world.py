"""A small world around one service on a real API server: two nodes with a GPU each, their kubelets, strangers' objects
that look like ours, and an operator that may die.

Invariants: whoever serves is looked at with every round; an operator that has nothing left to do is not believed
before another one, which knows nothing, has nothing to do either.
Knows nothing of what befalls the service, and of how the operator decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.operator.reconcile.kubelet import condition
from tests.operator.walk.arena import NAMESPACE, Arena, Touch
from tests.operator.walk.grouped import Sets, lacks_mates
from tests.operator.walk.kubelets import AMOUNTS, UP, Kubelets, holds
from tests.operator.walk.news import caught_up
from tests.operator.walk.seat import Died, Seat, Unwatched
from tests.operator.walk.strangers import STRANGERS, touched

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster, Object
from stoker_operator.cluster.kinds import Kind
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.observe.rollout import is_finished, is_ready, is_terminating
from stoker_operator.reconcile import ApplyFailed, Reconciler
from stoker_operator.settings import Settings

# For so long nothing happens before it counts as rest, and so long it may take, in seconds.
QUIET_SECONDS = 0.15
PATIENCE_SECONDS = 240.0
_REFUSED = (404, 409, 422)


class World:
    """One namespace, where histories of one service, `demo`, are walked one after the other.

    `place` is a number that no other world of the arena has now.
    """

    def __init__(self, arena: Arena, place: int, spec: Mapping[str, Any]) -> None:
        self.arena, self.mirror = arena, arena.mirror
        self.namespace = f"walk-{uuid.uuid4().hex[:8]}"
        self.touch = arena.touched[self.namespace] = Touch()
        self.labels = {"walk": f"place-{place}"}
        nodes = {f"place-{place}-{letter}": UP for letter in "ab"}
        self.kubelets = Kubelets(self.labels, place, nodes)
        self.good = {**spec, "placement": {"schedulerName": "nobody", "nodeSelector": self.labels}}
        self.later = timedelta()
        self.said: list[str] = []
        self.must_serve = False
        self.uid = ""
        self.taken: list[Kind] = []
        self.sets = Sets(arena.cluster, self.namespace)
        self._going: set[str] = set()
        self._read: dict[str, tuple[Any, Object]] = {}
        self._untouched: dict[tuple[str, str], int] = {}
        self.restart()

    def restart(self) -> None:
        """Another process of the operator, with nothing of what the one before knew."""
        self.seat = Seat(self.mirror)
        self.reconciler = self._operator(self.seat)

    def _operator(self, cluster: Cluster) -> Reconciler:
        return Reconciler(cluster, PodClient(2.0), Settings(), clock=self.now)

    def now(self) -> datetime:
        """The time, with all jumps."""
        return datetime.now(UTC) + self.later

    async def open(self) -> None:
        """Make the nodes, the namespace, and what strangers have in it."""
        for name in self.kubelets.nodes:
            await self._make_node(name)
        await self.arena.cluster._request(
            "POST", NAMESPACE, "/api/v1/namespaces", {"metadata": {"name": self.namespace}}
        )
        for kind, body in STRANGERS:
            await self.own(kind, body)

    async def begin(self) -> None:
        """Make the service, where the one before has left nothing behind; until it serves."""
        self.kubelets.mend()
        self.kubelets.rotten = self.kubelets.damaged = False
        self.later = timedelta()
        self.said.clear()
        self._going.clear()
        self._read.clear()
        self.restart()
        head = {"name": "demo", "namespace": self.namespace}
        body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": head, "spec": self.good}
        made = await self.mirror.create(kinds.INFERENCE_SERVICE, body)
        # Its watch may tell later than what counts as rest.
        self.uid = self.mirror.take_over(kinds.INFERENCE_SERVICE, made)["metadata"]["uid"]
        await self.settle()

    async def _make_node(self, name: str) -> None:
        head = {"apiVersion": "v1", "kind": "Node"}
        meta = {"name": name, "labels": {**self.labels, "node": name}}
        path = "/api/v1/nodes"
        try:
            made = await self.arena.cluster._request("POST", kinds.NODE, path, {**head, "metadata": meta})
        except ApiError as error:
            if error.status == 409:
                return
            raise
        made["spec"].pop("taints", None)  # the controller that takes it back does not run
        await self.arena.cluster._request("PUT", kinds.NODE, f"{path}/{name}", made)
        status = {"allocatable": AMOUNTS, "capacity": AMOUNTS, "conditions": [{"type": "Ready", "status": "True"}]}
        body = {**head, "metadata": {"name": name}, "status": status}
        await self.arena.cluster.apply(kinds.NODE, body, subresource="status", manager="kubelet")

    async def own(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """A stranger makes an object."""
        head = {"apiVersion": kind.api_version, "kind": kind.kind}
        meta = {**body["metadata"], "namespace": self.namespace}
        path = kind.path(self.namespace)
        made = await self.arena.cluster._request(
            "POST", kind, path, {**head, **body, "metadata": meta}, [("fieldManager", "somebody")]
        )
        shelf = self.mirror._shelves.get(kind.kind)
        if shelf is not None:
            shelf.put(made)

    async def close(self) -> None:
        """Take away what there is, without waiting for it."""
        for kind, body in STRANGERS:
            with contextlib.suppress(ApiError):
                path = kind.path(self.namespace, body["metadata"]["name"])
                await self.arena.cluster._request("DELETE", kind, path, {"gracePeriodSeconds": 0})
        with contextlib.suppress(ApiError):
            await self.arena.cluster._request("DELETE", NAMESPACE, f"/api/v1/namespaces/{self.namespace}", {})
        del self.arena.touched[self.namespace]

    async def change(self, spec: Mapping[str, Any]) -> None:
        """Patch the service's spec; what the API server refuses stays as it was."""
        try:
            await self.mirror.merge(kinds.INFERENCE_SERVICE, self.namespace, "demo", {"spec": spec})
        except ApiError as error:
            if error.status != 422:
                raise

    async def edit(self, kind: Kind, patch: Mapping[str, Any], name: str = "demo") -> None:
        """Another writer patches a child; nothing happens if it is not there or not ours, or the API server refuses."""
        if kind in self.taken:
            return
        path, content = kind.path(self.namespace, name), "application/merge-patch+json"
        writer = [("fieldManager", "somebody")]
        with contextlib.suppress(ApiError):
            made = await self.arena.cluster._request("PATCH", kind, path, dict(patch), writer, content)
            self.mirror._shelves[kind.kind].put(made)

    async def delete(self, kind: Kind, name: str = "demo") -> None:
        """Somebody deletes a child; nothing happens if it is not there or not ours."""
        found = next((item for item in self.here(kind) if item["metadata"]["name"] == name), None)
        if found is not None and not (kind in self.taken and name == "demo"):
            await self.mirror.delete(kind, self.namespace, name, found["metadata"]["uid"])

    async def service(self) -> Object:
        """The service as whoever wrote it last was told that it is stored."""
        found = await self.mirror.get(kinds.INFERENCE_SERVICE, self.namespace, "demo")
        assert found is not None, "the service is not known"
        return found

    def here(self, kind: Kind) -> list[Object]:
        """What the mirror knows of a kind in this namespace, by name; not to be changed."""
        shelf = self.mirror._shelves[kind.kind]
        names = sorted(shelf.inside.get(self.namespace, ()))
        return [self._parsed(shelf, name) for name in names]

    def _parsed(self, shelf: Any, name: str) -> Object:
        entry = shelf.entries[self.namespace, name]
        if self._read.get(entry.uid, (None,))[0] is not entry:
            self._read[entry.uid] = (entry, shelf.read((self.namespace, name)))
        return self._read[entry.uid][1]

    async def strangers_touched(self) -> list[str]:
        """The objects of others that were written or deleted; who wrote one is asked once for each of its versions."""
        names = [*((kind, "theirs") for kind, _ in STRANGERS), *((kind, "demo") for kind in self.taken)]
        found = []
        for kind, name in names:
            entry = self.mirror._shelves[kind.kind].entries.get((self.namespace, name))
            if entry is not None and self._untouched.get((kind.kind, entry.uid)) == entry.version:
                continue
            there = await self.arena.cluster.get(kind, self.namespace, name)
            if there is None or touched(there):
                found.append(f"{kind.kind} {name}")
            elif entry is not None:
                self._untouched[kind.kind, entry.uid] = entry.version
        return found

    def pods(self, component: str = "engine") -> list[Object]:
        """The operator's pods of a component, those on their way out apart."""
        return [pod for pod in self._ours() if not is_terminating(pod) and _component(pod) == component]

    def _ours(self) -> list[Object]:
        return [pod for pod in self.here(kinds.POD) if pod["metadata"].get("ownerReferences")]

    def answering(self) -> set[str]:
        """The names of the pods that serve."""
        computing = self._computing(self._ours())
        found = (pod for pod in computing if _component(pod) == "engine" and not lacks_mates(pod, computing))
        return {pod["metadata"]["name"] for pod in found}

    def _computing(self, pods: list[Object]) -> list[Object]:
        found = (pod for pod in pods if is_ready(pod) and not is_terminating(pod) and not is_finished(pod))
        return [pod for pod in found if not self.kubelets.hangs(pod)]

    async def settle(self) -> None:
        """Let everybody act until nobody has anything left to do."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE_SECONDS
        while True:
            self.touch.event.clear()
            seen, written = self.touch.count, len(self.seat.writes)
            played = await self.play()
            await self.reconcile()
            if played or self.touch.count != seen or len(self.seat.writes) != written:
                await asyncio.sleep(0)
            elif await self._rests(seen) and await self._nobody_else_writes():
                return
            if loop.time() > end:
                raise AssertionError(f"no rest: {self.waits() or self.seat.writes[-8:]}")

    async def _rests(self, seen: int) -> bool:
        """Whether nothing happens for a while, and Kubernetes' controllers have nothing left to do; `seen` is how many
        changes were seen before the last look.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.touch.event.wait(), 1.0 if self.waits() else QUIET_SECONDS)
        return self.touch.count == seen and not self.waits()

    async def _nobody_else_writes(self) -> bool:
        """An operator that has just started has nothing to do either."""
        if condition(self.seat.service, "Ready")["reason"] == "ApplyFailed":
            return True  # what the API server refuses is asked of it again
        seen, fresh = self.touch.count, Seat(self.mirror)
        fresh.dies_before(0)
        with contextlib.suppress(Died, ApplyFailed):
            await self._operator(fresh).reconcile(self.namespace, "demo")
        if fresh.refused:
            told = self.touch.count != seen or await self.caught_up()
            assert told, f"at rest a new operator writes {fresh.refused}"
        return not fresh.refused

    async def read_anew(self) -> None:
        """An operator that reads everything from the API server, and nothing from watches, has nothing to do either,
        unless the one that was there has by then, too.
        """
        while True:
            seen, written, fresh = self.touch.count, len(self.seat.writes), Unwatched(self.arena.cluster)
            with contextlib.suppress(ApplyFailed):
                await self._operator(fresh).reconcile(self.namespace, "demo")
            if not fresh.writes:
                return
            late = await self.caught_up() or self.touch.count != seen
            await self.settle()
            assert late or len(self.seat.writes) != written, f"an operator without watches writes {fresh.writes}"

    async def caught_up(self) -> bool:
        """Wait until watches have told everything; whether there was anything to tell."""
        seen = self.touch.count
        return await caught_up(self.arena, self.namespace, self.taken) or self.touch.count != seen

    def waits(self) -> str:
        """What Kubernetes' controllers still have to do; "" = nothing."""
        pods = self._ours()
        for item in self.here(kinds.DEPLOYMENT):
            if item.get("status", {}).get("observedGeneration", 0) < item["metadata"]["generation"]:
                return "the Deployment is not taken up"
        for item in self.here(kinds.REPLICA_SET):
            owned = [pod for pod in _owned(pods, item) if not is_terminating(pod) and not is_finished(pod)]
            if len(owned) != item["spec"]["replicas"]:
                return f"{item['metadata']['name']} has {len(owned)} of {item['spec']['replicas']} pods"
        for item in self.here(kinds.JOB):
            owned = _owned(pods, item)
            over = any(said["status"] == "True" for said in item.get("status", {}).get("conditions") or ())
            if not item["spec"].get("suspend") and not over and (not owned or all(map(is_finished, owned))):
                return f"Job {item['metadata']['name']} has no pod that runs"
        return self.sets.waits(self.here(kinds.LEADER_WORKER_SET), pods) or self._leaves()

    def _leaves(self) -> str:
        """What the garbage collector still has to take away."""
        owners = [*self.here(kinds.JOB), *self.here(kinds.REPLICA_SET), *self.sets.there]
        there = {item["metadata"]["uid"] for item in owners}
        live = (pod for pod in self._ours() if not is_terminating(pod))
        gone = [pod for pod in live if pod["metadata"]["ownerReferences"][0]["uid"] not in there]
        if gone:
            return f"pod {gone[0]['metadata']['name']} has no owner any more"
        if any(is_terminating(pod) and (self.kubelets.slow_ends or self.kubelets.hangs(pod)) for pod in self._ours()):
            return ""  # what they are of waits for them
        for kind in (kinds.JOB, kinds.DEPLOYMENT, kinds.REPLICA_SET, kinds.SERVICE, kinds.LEADER_WORKER_SET):
            for item in self.here(kind):
                if "deletionTimestamp" in item["metadata"]:
                    return f"{kind.kind} {item['metadata']['name']} is being deleted"
        return ""

    async def reconcile(self) -> None:
        """One reconcile. Ready is only said while a pod answers; nothing is written that changes nothing; who serves
        is there all the time where that is to be.
        """
        before = self.answering()
        try:
            await self.reconciler.reconcile(self.namespace, "demo")
        except ApplyFailed:
            pass
        except ApiError as error:
            if error.status not in _REFUSED:
                raise
        ready = condition(self.seat.service, "Ready")
        said = f"{ready['status']} {ready['reason']}: {ready['message']}"
        if not self.said or self.said[-1] != said:
            self.said.append(said)
        serving = self.answering()
        if ready["status"] == "True":
            assert before | serving, f"Ready while no pod answers: {ready['message']}"
        assert not self.seat.idle, f"a write without cause: {self.seat.idle}"
        assert serving or not self.must_serve, "who served was lost"

    async def play(self) -> bool:
        """The scheduler's and the kubelets' part, for every pod that has not come where its spec leads it; whether
        anything was done.
        """
        acted = await self.sets.play(self.here(kinds.LEADER_WORKER_SET))
        pods = self._ours()
        computing = self._computing(pods)
        dead = {_address(pod) for pod in pods if self.kubelets.hangs(pod) or lacks_mates(pod, computing)}
        self.arena.dead.difference_update({_address(pod) for pod in pods} - dead)
        self.arena.dead.update(dead)
        self.kubelets.alone = {pod["metadata"]["uid"] for pod in pods if lacks_mates(pod, computing)}
        for pod in pods:
            try:
                acted |= await self._play_one(pod, pods)
            except ApiError as error:
                if error.status not in _REFUSED:
                    raise
                # Another pod than is known here, or none: its watch is about to tell.
                acted |= error.status != 422
                await asyncio.sleep(0.05)
        return acted

    async def _play_one(self, pod: Object, pods: list[Object]) -> bool:
        node, name = pod["spec"].get("nodeName"), pod["metadata"]["name"]
        if is_terminating(pod):
            return await self._end(pod) if node else False
        if not node and not is_finished(pod):
            node, said = self.kubelets.place(pod, pods)
            if node:
                target = {"apiVersion": "v1", "kind": "Node", "name": node}
                body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
                path = f"{kinds.POD.path(self.namespace, name)}/binding"
                await self.arena.cluster._request("POST", kinds.POD, path, body)
                return True
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
            return await self._write(pod, {"phase": "Pending", "conditions": [unplaced]})
        if not node:
            return False
        wanted = self.kubelets.status(pod, self.now())
        return await self._write(pod, wanted) if wanted is not None else False

    async def _end(self, pod: Object) -> bool:
        """A pod on its way out goes in the round after that in which it was seen so, where its node lets it."""
        meta = pod["metadata"]
        if self.kubelets.slow_ends or self.kubelets.hangs(pod):
            return False
        if meta["uid"] not in self._going:
            self._going.add(meta["uid"])
            return True
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        await self.arena.cluster._request("DELETE", kinds.POD, kinds.POD.path(self.namespace, meta["name"]), body)
        return True

    async def _write(self, pod: Object, status: Mapping[str, Any]) -> bool:
        known, meta = pod.get("status", {}), pod["metadata"]
        if all(holds(known.get(key), value) for key, value in status.items()):
            return False
        head = {"name": meta["name"], "namespace": self.namespace, "uid": meta["uid"]}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": head, "status": status}
        await self.mirror.apply(kinds.POD, body, subresource="status", manager="kubelet")
        return True


def _component(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get("app.kubernetes.io/component", ""))


def _owned(pods: list[Object], owner: Object) -> list[Object]:
    uid = owner["metadata"]["uid"]
    return [pod for pod in pods if any(item["uid"] == uid for item in pod["metadata"]["ownerReferences"])]


def _address(pod: Object) -> str:
    return str(pod.get("status", {}).get("podIP", ""))
