"""The controllers' part in `stoker up`: Deployment → ReplicaSet → pods, Job → pods, claim → folder.

Invariants: level-triggered like their originals: `sync` may be called at any time and does what is still missing; a
pod's processes belong to one task, which ends them whatever ends it.
Knows nothing of InferenceServices.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Object
from stoker_operator.cluster.kinds import Kind
from stoker_operator.local.pod import LocalPod
from stoker_operator.local.process import LOOPBACK, Machine
from stoker_operator.local.store import LocalCluster, timestamp
from stoker_operator.manifests import claim_name, owns_claim
from stoker_operator.manifests.identity import short_hash
from stoker_operator.observe.rollout import REVISION, TEMPLATE_HASH, is_ready
from stoker_operator.spec.service import InferenceService

_JOB_BACK_OFF_SECONDS = 2.0

# Where every pod runs that has what it needs.
NODE_NAME = "this-machine"


class Controllers:
    """Keeps pods running for the workloads in the store. `gpus` are the indices of this machine's GPUs."""

    def __init__(self, store: LocalCluster, data: Path, machine: Machine, gpus: frozenset[int]) -> None:
        self._store = store
        self._data = data
        self._machine = machine
        self._gpus = gpus
        self.pods: dict[str, LocalPod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._used_gpus: dict[str, tuple[int, ...]] = {}
        self._retry_at: dict[str, float] = {}
        self._ending: set[str] = set()
        self._numbers = itertools.count()

    def sync(self) -> None:
        """Do what the workloads in the store still need."""
        for claim in self._store.of(kinds.CLAIM):
            claim.setdefault("status", {"phase": "Bound"})
            self._volume(claim["metadata"]).mkdir(parents=True, exist_ok=True)
        for deployment in self._store.of(kinds.DEPLOYMENT):
            self._sync_deployment(deployment)
        for job in self._store.of(kinds.JOB):
            self._sync_job(job)
        for pod in self._store.of(kinds.POD):
            self._sync_pod(pod)

    async def shut_down(self) -> None:
        """End every pod with its grace."""
        for pod in self._store.of(kinds.POD):
            pod["metadata"].setdefault("deletionTimestamp", timestamp())
            self._sync_pod(pod)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def kill(self) -> None:
        """End every process at once."""
        for pod in self.pods.values():
            pod.kill()

    def _sync_deployment(self, deployment: Object) -> None:
        template = deployment["spec"]["template"]
        revision = short_hash(template)
        meta = deployment["metadata"]
        sets = list(self._store.owned_by(kinds.REPLICA_SET, deployment))
        current = next((item for item in sets if item["metadata"]["labels"][TEMPLATE_HASH] == revision), None)
        if current is None:
            current = self._add_replica_set(deployment, template, revision, len(sets) + 1)
        meta.setdefault("annotations", {})[REVISION] = current["metadata"]["annotations"][REVISION]
        deployment["status"] = {"observedGeneration": meta["generation"]}
        old = [pod for item in sets if item is not current for pod in self._live_pods(item)]
        new = self._live_pods(current)
        wanted = int(deployment["spec"].get("replicas", 1))
        # In place when nothing may surge: the old pods hold what the new ones need.
        surge = deployment["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 1)
        if old and (not surge or sum(map(is_ready, new)) >= wanted):
            for pod in old:
                self._store.remove(pod)
        if not old or surge:
            for _ in range(wanted - len(new)):
                self._add_pod(current, template, "ReplicaSet")
        for pod in new[wanted:]:
            self._store.remove(pod)

    def _add_replica_set(self, deployment: Object, template: Mapping[str, Any], revision: str, number: int) -> Object:
        meta = deployment["metadata"]
        return self._store.add(
            {
                "apiVersion": kinds.REPLICA_SET.api_version,
                "kind": kinds.REPLICA_SET.kind,
                "metadata": {
                    "name": f"{meta['name']}-{revision}",
                    "namespace": meta["namespace"],
                    "labels": template["metadata"]["labels"] | {TEMPLATE_HASH: revision},
                    "annotations": {REVISION: str(number)},
                    "ownerReferences": [_owner(deployment, kinds.DEPLOYMENT)],
                },
            }
        )

    def _sync_job(self, job: Object) -> None:
        """One pod at a time, as often as backoffLimit and podFailurePolicy allow."""
        if job.get("status", {}).get("conditions"):
            return
        pods = list(self._store.owned_by(kinds.POD, job))
        failed = [pod for pod in pods if pod.get("status", {}).get("phase") == "Failed"]
        if any(pod.get("status", {}).get("phase") == "Succeeded" for pod in pods):
            _finish(job, "Complete")
        elif any(_exit_code(pod) in _final_codes(job) for pod in failed) or len(failed) > job["spec"]["backoffLimit"]:
            _finish(job, "Failed")
        elif len(failed) == len(pods) and self._due(job["metadata"]["uid"], len(failed)):
            self._add_pod(job, job["spec"]["template"], "Job")
        else:
            return
        self._store.touch()

    def _due(self, uid: str, failures: int) -> bool:
        """Whether the back-off after the last failure is over."""
        if not failures:
            return True
        now = asyncio.get_running_loop().time()
        key = f"{uid}/{failures}"
        due = self._retry_at.setdefault(key, now + _JOB_BACK_OFF_SECONDS * 2.0 ** (failures - 1))
        return now >= due

    def _add_pod(self, owner: Object, template: Mapping[str, Any], kind: str) -> None:
        meta = owner["metadata"]
        labels = dict(template["metadata"]["labels"])
        if TEMPLATE_HASH in meta.get("labels", {}):
            labels[TEMPLATE_HASH] = meta["labels"][TEMPLATE_HASH]
        name = f"{meta['name']}-{short_hash([meta['uid'], next(self._numbers)], 5)}"
        reference = _owner(owner, kinds.BY_NAME[kind])
        metadata = {"name": name, "namespace": meta["namespace"], "labels": labels, "ownerReferences": [reference]}
        spec = copy.deepcopy(dict(template["spec"]))
        self._store.add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def _sync_pod(self, pod: Object) -> None:
        """Start the pod's task, or end it when the pod is deleted."""
        uid = pod["metadata"]["uid"]
        going = "deletionTimestamp" in pod["metadata"]
        if uid not in self._tasks and not going:
            gpus = self._free_gpus(pod)
            if gpus is None:
                return
            self._used_gpus[uid] = gpus
            pod["spec"]["nodeName"] = NODE_NAME
            local = LocalPod(self._store, pod, self._machine_for(pod, gpus))
            self.pods[uid] = local
            self._tasks[uid] = asyncio.create_task(self._live(uid, local), name=local.name)
        elif uid not in self._tasks:
            self._store.forget(pod)
        elif going and uid not in self._ending:
            self._ending.add(uid)
            self._tasks[uid] = asyncio.create_task(self._end(uid, pod, self._tasks[uid]))

    async def _live(self, uid: str, local: LocalPod) -> None:
        try:
            await local.run()
        finally:
            self._used_gpus.pop(uid, None)
            self._store.touch()

    async def _end(self, uid: str, pod: Object, living: asyncio.Task[None]) -> None:
        await self.pods[uid].shut_down()
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        self._store.forget(pod)

    def _free_gpus(self, pod: Object) -> tuple[int, ...] | None:
        """GPUs for a pod; None, and a scheduler's sentence in its status, when too few are free."""
        limits = [container["resources"].get("limits", {}) for container in pod["spec"]["containers"]]
        wanted = {name: int(count) for item in limits for name, count in item.items() if "/" in name}
        taken = {index for gpus in self._used_gpus.values() for index in gpus}
        free = sorted(self._gpus - taken)
        count = sum(wanted.values())
        if count <= len(free):
            return tuple(free[:count])
        text = f"0/1 nodes are available: 1 Insufficient {next(iter(wanted))}."
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
        pod["status"] = {"phase": "Pending", "conditions": [unscheduled]}
        return None

    def _machine_for(self, pod: Object, gpus: tuple[int, ...]) -> Machine:
        """Folders, ports and GPUs of one pod."""
        owner = pod["metadata"]["labels"].get("app.kubernetes.io/instance", pod["metadata"]["name"])
        folders: dict[str, Path] = {}
        for volume in pod["spec"].get("volumes", ()):
            claim = volume.get("persistentVolumeClaim")
            if claim:
                folders[volume["name"]] = self._volume(pod["metadata"] | {"name": claim["claimName"]})
            elif "secret" in volume:
                folders[volume["name"]] = self._secret(
                    volume["secret"], self._data / "secrets" / owner / volume["name"]
                )
            elif volume.get("emptyDir", {}).get("medium") != "Memory":
                # Kept between runs, for the compilers' caches in it. /dev/shm stays the system's own.
                folders[volume["name"]] = self._data / "scratch" / owner / volume["name"]
                folders[volume["name"]].mkdir(parents=True, exist_ok=True)
        ports = [port["containerPort"] for item in pod["spec"]["containers"] for port in item.get("ports", ())]
        chosen = dict(zip(ports, free_ports(len(ports)), strict=True))
        return replace(self._machine, folders=folders, ports=chosen, gpus=gpus)

    def _secret(self, source: Mapping[str, Any], folder: Path) -> Path:
        """The Secret's keys as files that nobody else may read; what is missing stays missing."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        values = self._machine.secrets.get(source["secretName"], {})
        for item in source["items"]:
            file = folder / item["path"]
            file.unlink(missing_ok=True)
            if item["key"] in values:
                file.touch(mode=0o600)
                file.write_text(values[item["key"]])
        return folder

    def take_claim(self, service: InferenceService) -> None:
        """A claim of the user's own is a folder below `volumes` that the user made."""
        meta = {"name": claim_name(service), "namespace": service.namespace}
        there = any(claim["metadata"]["name"] == meta["name"] for claim in self._store.of(kinds.CLAIM))
        if not owns_claim(service) and not there and self._volume(meta).is_dir():
            self._store.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta})

    def _volume(self, meta: Mapping[str, Any]) -> Path:
        return self._data / "volumes" / str(meta["namespace"]) / str(meta["name"])

    def _live_pods(self, owner: Object) -> list[Object]:
        pods = self._store.owned_by(kinds.POD, owner)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def free_ports(count: int) -> list[int]:
    """Loopback ports that were free a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _owner(item: Object, kind: Kind) -> dict[str, Any]:
    meta = item["metadata"]
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
    }


def _finish(job: Object, condition: str) -> None:
    entry = {"type": condition, "status": "True", "lastTransitionTime": timestamp()}
    job["status"] = {"conditions": [entry]}


def _final_codes(job: Object) -> set[int]:
    """Exit statuses after which the Job's podFailurePolicy gives up at once."""
    rules = job["spec"].get("podFailurePolicy", {}).get("rules", ())
    return {
        code for rule in rules if rule["action"] == "FailJob" for code in rule.get("onExitCodes", {}).get("values", ())
    }


def _exit_code(pod: Object) -> int:
    for container in pod["status"].get("containerStatuses", ()):
        return int(container["state"].get("terminated", {}).get("exitCode", 0))
    return 0
