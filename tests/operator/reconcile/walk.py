"""A small world around one service on a real API server: a scheduler, kubelets and engines as their statuses would say,
and what may befall them, one step at a time.

Invariants: a pod does what its own spec lets it do (an image that is there, a node that would take it), never what the
test hopes for; the clock only moves forward.
Knows nothing of how the operator decides.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from tests.operator.reconcile.everything import versions
from tests.operator.reconcile.kubelet import REPORT, condition

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster, Object
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.observe.rollout import is_ready, is_terminating
from stoker_operator.reconcile import ApplyFailed, Reconciler
from stoker_operator.settings import Settings

GOOD: dict[str, Any] = {
    "model": {"uri": "hf://org/model"},
    "resources": {"gpus": 0, "memory": "4Gi"},
    "runtime": {"image": "stoker/runtime:1"},
    "placement": {"schedulerName": "nobody"},
    "cache": {"verify": "Scheduled", "verifyEvery": "300s"},
    "replicas": 1,
}
_ROUNDS = 60
_QUIET_ROUNDS = 3
STEPS: dict[str, Callable[[World, int], Any]] = {}
Step = tuple[str, int]


def step(function: Callable[[World, int], Any]) -> Callable[[World, int], Any]:
    STEPS[function.__name__] = function
    return function


class Died(Exception):
    """The operator's process ended between two writes."""


class Mortal(Cluster):
    """A cluster whose operator is killed before its write number `left`."""

    def __init__(self, cluster: Cluster, left: int) -> None:
        self._share(cluster)
        self._left = left

    async def _request(self, method: str, *arguments: Any, **more: Any) -> Object:
        if method != "GET":
            if not self._left:
                raise Died
            self._left -= 1
        return await super()._request(method, *arguments, **more)


class World:
    """One namespace with one service, `demo`. Pods answer from one server, unless their address is among `dead`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.namespace = f"walk-{uuid.uuid4().hex[:8]}"
        self.reconciler = Reconciler(cluster, PodClient(2.0), Settings(), clock=self.now)
        self.dead: set[str] = set()
        self.fetch_fails = ""
        self.rotten = False
        self.later = timedelta()
        self.said: list[str] = []
        self._number = 0

    def now(self) -> datetime:
        """The time, with all jumps."""
        return datetime.now(UTC) + self.later

    async def begin(self) -> None:
        """Make the namespace, a stranger's object in it that looks like ours, and the service."""
        await self.cluster._request("POST", _NAMESPACE, "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        labels = {"app.kubernetes.io/managed-by": "stoker", "app.kubernetes.io/instance": "demo"}
        head = {"name": "theirs", "namespace": self.namespace, "labels": labels}
        body = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": head}
        self.theirs = await self.cluster.create(kinds.NETWORK_POLICY, body | {"spec": {"podSelector": {}}})
        head = {"name": "demo", "namespace": self.namespace}
        body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": head, "spec": GOOD}
        await self.cluster.create(kinds.INFERENCE_SERVICE, body)

    async def end(self) -> None:
        """Take it all away."""
        await self.cluster._request("DELETE", _NAMESPACE, f"/api/v1/namespaces/{self.namespace}", {})

    async def change(self, spec: Mapping[str, Any]) -> None:
        """Patch the service's spec."""
        await self.cluster.merge(kinds.INFERENCE_SERVICE, self.namespace, "demo", {"spec": spec})

    async def edit(self, kind: kinds.Kind, patch: Mapping[str, Any]) -> None:
        """Another writer patches a child; nothing happens if it is not there."""
        try:
            await self.cluster.merge(kind, self.namespace, "demo", patch)
        except ApiError as error:
            if error.status != 404:
                raise

    async def service(self) -> Object:
        """The service as it is stored."""
        found = await self.cluster.get(kinds.INFERENCE_SERVICE, self.namespace, "demo")
        assert found is not None
        return found

    async def pods(self, component: str = "engine") -> list[Object]:
        """Pods that are not on their way out, the oldest first."""
        label = f"app.kubernetes.io/component={component}"
        found = await self.cluster.list_all(kinds.POD, self.namespace, label)
        return sorted((pod for pod in found if not is_terminating(pod)), key=lambda pod: pod["metadata"]["name"])

    async def answering(self) -> set[str]:
        """The names of the pods that serve."""
        return {pod["metadata"]["name"] for pod in await self.pods() if is_ready(pod) and not self.is_dead(pod)}

    def is_dead(self, pod: Object) -> bool:
        """Whether nothing answers at its address."""
        return pod.get("status", {}).get("podIP") in self.dead

    async def settle(self) -> None:
        """Let everybody act until nobody has anything left to do."""
        quiet, before = 0, None
        for _ in range(_ROUNDS):
            await self._play()
            again = await self.reconcile()
            after = await self._state()
            quiet = quiet + 1 if after == before and again != 0.5 else 0
            if quiet == _QUIET_ROUNDS:
                return
            before = after
            await asyncio.sleep(0.05)
        raise AssertionError(f"no rest after {_ROUNDS} rounds; it says {self.said[-1]}")

    async def reconcile(self) -> float | None:
        """One reconcile; Ready is only said while a pod answers."""
        before = await self.answering()
        try:
            again = await self.reconciler.reconcile(self.namespace, "demo")
        except ApplyFailed:
            again = 0.0
        ready = condition(await self.service(), "Ready")
        self.said.append(f"{ready['status']} {ready['reason']}: {ready['message']}")
        if ready["status"] == "True":
            assert before | await self.answering(), f"Ready while no pod answers: {ready['message']}"
        return again

    async def _state(self) -> dict[tuple[str, str], str]:
        found = await versions(self.cluster, self.namespace)
        return {key: version for key, version in found.items() if key[0] != "Event"}

    async def _play(self) -> None:
        """The scheduler's and the kubelets' part, for every pod that has not come where its spec leads it."""
        for pod in [*await self.pods("fetch"), *await self.pods("verify"), *await self.pods()]:
            wanted = self._status(pod)
            known = pod.get("status", {})
            if wanted is None or all(known.get(key) == value for key, value in wanted.items()):
                continue
            meta = {"name": pod["metadata"]["name"], "namespace": self.namespace, "uid": pod["metadata"]["uid"]}
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": wanted}
            try:
                await self.cluster.apply(kinds.POD, body, subresource="status", manager="kubelet")
            except ApiError as error:
                if error.status not in (404, 409, 422):
                    raise

    def _status(self, pod: Object) -> dict[str, Any] | None:
        spec, known = pod["spec"], pod.get("status", {})
        container = spec["containers"][0]
        if known.get("phase") in ("Failed", "Succeeded") or is_ready(pod):
            return None
        memory = (container["resources"].get("limits") or {}).get("memory", "")
        lacks = "didn't match Pod's node affinity/selector" if spec.get("nodeSelector") else ""
        lacks = lacks or ("Insufficient memory" if memory == "900Gi" else "")
        if lacks:
            said = f"0/1 nodes are available: 1 {lacks}."
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
            return {"phase": "Pending", "conditions": [unplaced]}
        status = {"name": container["name"], "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        if "nowhere" in container["image"]:
            status["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
            return {"phase": "Pending", "containerStatuses": [status]}
        if container["name"] == "fetch":
            self.rotten = self.rotten and bool(self.fetch_fails or "--repair" not in container["args"])
            return self._ended(status, self.fetch_fails)
        if container["name"] == "verify":
            return self._ended(status, "ChecksumMismatch" if self.rotten else "")
        self._number += 1
        address = known.get("podIP") or f"127.1.{self._number // 250}.{self._number % 250 + 1}"
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        return {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [ready]}

    def _ended(self, status: dict[str, Any], failure: str) -> dict[str, Any]:
        said = {"reason": failure, "message": "as played"} if failure else REPORT
        ended = {"exitCode": 3 if failure else 0, "message": json.dumps(said)}
        status["state"] = {"terminated": ended | {"finishedAt": self.now().strftime("%Y-%m-%dT%H:%M:%SZ")}}
        return {"phase": "Failed" if failure else "Succeeded", "containerStatuses": [status]}


_NAMESPACE = kinds.Kind("v1", "Namespace", "namespaces")


async def serve(world: World) -> web.AppRunner:
    """One server for all addresses of this machine's loopback; where a pod is dead, it hangs up."""

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        if request.transport.get_extra_info("sockname")[0] in world.dead:
            request.transport.abort()
        return web.json_response({"choices": [{"text": "!"}]})

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    return runner


# What may befall the service. `n` chooses among variants.


@step
async def another_revision(world: World, n: int) -> None:
    await world.change({"runtime": {"args": ["--seed", str(n)]}})


@step
async def a_wrong_image(world: World, n: int) -> None:
    await world.change({"runtime": {"image": f"nowhere/none:{n}"}})


@step
async def a_right_image(world: World, n: int) -> None:
    await world.change({"runtime": {"image": f"stoker/runtime:{n % 3}"}})


@step
async def a_selector_without_a_node(world: World, n: int) -> None:
    await world.change({"placement": {"nodeSelector": {"no": f"node-{n}"}}})


@step
async def no_selector(world: World, n: int) -> None:
    await world.change({"placement": {"nodeSelector": None}})


@step
async def memory(world: World, n: int) -> None:
    await world.change({"resources": {"memory": ("4Gi", "5Gi", "900Gi")[n % 3]}})


@step
async def replicas(world: World, n: int) -> None:
    await world.change({"replicas": n % 3})


@step
async def suspend(world: World, n: int) -> None:
    await world.change({"suspend": n % 2 == 0})


@step
async def another_model(world: World, n: int) -> None:
    await world.change({"model": {"uri": f"hf://org/model-{n % 3}"}})


@step
async def another_secret(world: World, n: int) -> None:
    await world.change({"model": {"secretRef": {"name": f"token-{n % 2}"}}})


@step
async def fetches_fail(world: World, n: int) -> None:
    world.fetch_fails = ("", "TokenRejected", "HubUnreachable", "VolumeFull")[n % 4]


@step
async def a_file_rots(world: World, n: int) -> None:
    """Its size and time stay; pods that serve have read it."""
    world.rotten = True


@step
async def a_child_is_edited(world: World, n: int) -> None:
    edits: list[tuple[kinds.Kind, dict[str, Any]]] = [
        (kinds.SERVICE, {"spec": {"selector": {"nobody": "has"}}}),
        (kinds.NETWORK_POLICY, {"spec": {"podSelector": {"matchLabels": {"only": "this"}}}}),
        (kinds.DISRUPTION_BUDGET, {"spec": {"maxUnavailable": 9}}),
        (kinds.DEPLOYMENT, {"spec": {"template": {"spec": {"nodeSelector": {"no": "node"}}}}}),
        (kinds.DEPLOYMENT, {"metadata": {"annotations": {"team": "search"}}}),
    ]
    await world.edit(*edits[n % len(edits)])


@step
async def a_child_is_deleted(world: World, n: int) -> None:
    kind = (kinds.SERVICE, kinds.NETWORK_POLICY, kinds.DISRUPTION_BUDGET, kinds.SERVICE_ACCOUNT)[n % 4]
    found = await world.cluster.get(kind, world.namespace, "demo")
    if found is not None:
        await world.cluster.delete(kind, world.namespace, "demo", found["metadata"]["uid"])


@step
async def jobs_are_deleted(world: World, n: int) -> None:
    for job in await world.cluster.list_all(kinds.JOB, world.namespace):
        await world.cluster.delete(kinds.JOB, world.namespace, job["metadata"]["name"], job["metadata"]["uid"])


@step
async def a_pod_is_deleted(world: World, n: int) -> None:
    for pod in (await world.pods())[n % 2 :][:1]:
        await world.cluster.delete(kinds.POD, world.namespace, pod["metadata"]["name"], pod["metadata"]["uid"])


@step
async def a_node_is_lost(world: World, n: int) -> None:
    """Its kubelet hangs and goes on saying ready; nothing answers any more."""
    for pod in (await world.pods())[n % 2 :][:1]:
        world.dead |= {pod["status"]["podIP"]} if is_ready(pod) else set()


@step
async def nodes_come_back(world: World, n: int) -> None:
    world.dead.clear()


@step
async def time_passes(world: World, n: int) -> None:
    world.later += timedelta(seconds=(20, 100, 700, 4000)[n % 4])


@step
async def the_operator_is_killed(world: World, n: int) -> None:
    """In the midst of a change, before its write number n; another process takes over."""
    await world.change({"runtime": {"args": ["--seed", str(1000 + n)]}})
    try:
        await replace(world.reconciler, cluster=Mortal(world.cluster, n % 5)).reconcile(world.namespace, "demo")
    except (Died, ApplyFailed):
        return
