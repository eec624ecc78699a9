"""A stand-in for the controller of LeaderWorkerSets, for tests that take its steps one by one.

A walk goes on once nobody has anything more to do, and a test holds the controller still to see what the operator says
meanwhile. The publisher's own (e2e/cluster/groups.py) acts when it likes, and takes minutes to build.
This does what that does, over real StatefulSets: a StatefulSet of leaders, one of workers for each leader, which
goes with it; the variables and labels by which pods of a group find each other; a group of which a pod ended or is
deleted starts anew as a whole; a new template goes from group to group; the scale and the status.
Invariants: whatever happened, one more `step` brings things nearer to what the sets ask for. What it does not do:
surge, sub-groups, placement of groups, claims of their own, and admission; a pod's labels come a moment after it.
Knows nothing of Stoker.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import LEADER_WORKER_SET, POD, Kind

STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
MANAGER = "group-stand-in"
PERIOD_SECONDS = 0.5
_PREFIX = "leaderworkerset.sigs.k8s.io"
NAME, GROUP, WORKER, REVISION = (
    f"{_PREFIX}/{key}" for key in ("name", "group-index", "worker-index", "template-revision-hash")
)
Object = dict[str, Any]


async def follow(cluster: Cluster, namespace: str, rest: asyncio.Lock | None = None) -> None:
    """Look after the sets of a namespace, until cancelled; while somebody holds `rest`, nothing is done."""
    rest = rest or asyncio.Lock()
    while True:
        try:
            async with rest:
                await step(cluster, namespace)
        except ApiError as error:
            if error.status not in (0, 404, 409):  # somebody was faster, or the test's API server goes
                raise
        await asyncio.sleep(PERIOD_SECONDS)


async def step(cluster: Cluster, namespace: str) -> None:
    """Look at all sets of a namespace once. Raises ApiError."""
    for item in await cluster.list_all(LEADER_WORKER_SET, namespace):
        if "deletionTimestamp" not in item["metadata"]:
            await _look_after(cluster, namespace, item)


async def _look_after(cluster: Cluster, namespace: str, item: Object) -> None:
    name = item["metadata"]["name"]
    await cluster.apply(STATEFUL_SET, _leaders(item), manager=MANAGER)
    pods = await cluster.list_all(POD, namespace, f"{NAME}={name}")
    for pod in pods:
        await _label(cluster, pod, name)
    leaders = [pod for pod in pods if _is_leader(pod, name)]
    for leader in leaders:
        mates = [pod for pod in pods if pod["metadata"]["name"].startswith(f"{leader['metadata']['name']}-")]
        if "deletionTimestamp" in leader["metadata"]:
            continue
        if any(map(_restarted, (leader, *mates))) or any("deletionTimestamp" in pod["metadata"] for pod in mates):
            meta = leader["metadata"]
            await cluster.delete(POD, namespace, meta["name"], meta["uid"], foreground=True)
        else:
            await _add_workers(cluster, item, leader)
    head = {"apiVersion": item["apiVersion"], "kind": item["kind"], "metadata": {"name": name, "namespace": namespace}}
    await cluster.apply(LEADER_WORKER_SET, head | {"status": _status(item, leaders)}, "status", MANAGER)


def _leaders(item: Object) -> Object:
    spec = item["spec"]["leaderWorkerTemplate"]
    name, template = item["metadata"]["name"], spec.get("leaderTemplate") or spec["workerTemplate"]
    address = f"$(LWS_POD_NAME).{name}.{item['metadata']['namespace']}"
    chosen = {NAME: name, WORKER: "0"}
    made = _stateful_set(item, name, item, chosen, _told(template, address, spec["size"], {"value": "0"}))
    made["spec"]["replicas"] = item["spec"]["replicas"]
    return made


async def _add_workers(cluster: Cluster, item: Object, leader: Object) -> None:
    spec, meta = item["spec"]["leaderWorkerTemplate"], leader["metadata"]
    group = meta["name"].rpartition("-")[2]
    if spec["size"] == 1 or meta["labels"].get(REVISION) != revision(item):
        return
    there = await cluster.get(STATEFUL_SET, meta["namespace"], meta["name"])
    if there is not None:
        return  # that of this leader, or of the one before, which is going
    address = f"{meta['name']}.{item['metadata']['name']}.{meta['namespace']}"
    index = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}}
    chosen = {NAME: item["metadata"]["name"], GROUP: group}
    template = _told(spec["workerTemplate"], address, spec["size"], index)
    made = _stateful_set(item, meta["name"], leader, chosen, template)
    made["spec"] |= {"replicas": spec["size"] - 1, "ordinals": {"start": 1}}
    # The leaders carry the group's label too, and are another set's.
    either = {"key": WORKER, "operator": "NotIn", "values": ["0"]}
    made["spec"]["selector"]["matchExpressions"] = [either]
    await cluster.create(STATEFUL_SET, made)


def _stateful_set(item: Object, name: str, owner: Object, chosen: Mapping[str, str], template: Object) -> Object:
    """A StatefulSet of pods that carry the labels `chosen`, and goes with its `owner`."""
    meta = template.setdefault("metadata", {})
    meta["labels"] = {**(meta.get("labels") or {}), **chosen, REVISION: revision(item)}
    size = str(item["spec"]["leaderWorkerTemplate"]["size"])
    meta["annotations"] = {**(meta.get("annotations") or {}), f"{_PREFIX}/size": size}
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"]}
    reference |= {"uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}
    return {
        "apiVersion": STATEFUL_SET.api_version,
        "kind": STATEFUL_SET.kind,
        "metadata": {
            "name": name,
            "namespace": item["metadata"]["namespace"],
            "labels": {NAME: item["metadata"]["name"], REVISION: revision(item)},
            "ownerReferences": [reference],
        },
        "spec": {
            "serviceName": item["metadata"]["name"],
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": dict(chosen)},
            "template": template,
        },
    }


def _told(template: Mapping[str, Any], address: str, size: int, index: Object) -> Object:
    """A copy of a pod template whose containers have the group's variables."""
    made: Object = json.loads(json.dumps(template))
    named = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    told = [
        {"name": "LWS_POD_NAME", **named},
        {"name": "LWS_LEADER_ADDRESS", "value": address},
        {"name": "LWS_GROUP_SIZE", "value": str(size)},
        {"name": "LWS_WORKER_INDEX", **index},
    ]
    for kind in ("containers", "initContainers"):
        for container in made["spec"].get(kind) or ():
            container["env"] = [*told, *(container.get("env") or ())]
    return made


def revision(item: Object) -> str:
    """What pods of the set's newest template carry as their label REVISION."""
    text = json.dumps(item["spec"]["leaderWorkerTemplate"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _is_leader(pod: Object, name: str) -> bool:
    return str(pod["metadata"]["name"]).removeprefix(f"{name}-").isdigit()


async def _label(cluster: Cluster, pod: Object, name: str) -> None:
    """What the publisher's webhook gives a pod when it is made: its number of its group, and in it."""
    group, _, worker = str(pod["metadata"]["name"]).removeprefix(f"{name}-").partition("-")
    wanted = {GROUP: group, WORKER: worker or "0"}
    if not wanted.items() <= (pod["metadata"].get("labels") or {}).items():
        meta = pod["metadata"]
        await cluster.merge(POD, meta["namespace"], meta["name"], {"metadata": {"labels": wanted}})


def _restarted(pod: Object) -> bool:
    status = pod.get("status") or {}
    statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return any(int(each.get("restartCount", 0)) > 0 for each in statuses)


def _status(item: Object, leaders: list[Object]) -> Object:
    def ready(pod: Object) -> bool:
        conditions = (pod.get("status") or {}).get("conditions") or ()
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    fresh = [pod for pod in leaders if (pod["metadata"]["labels"]).get(REVISION) == revision(item)]
    whole = len([pod for pod in fresh if ready(pod)]) == item["spec"]["replicas"]
    available = {"type": "Available", "status": str(whole), "reason": "StandIn", "message": ""}
    return {
        "replicas": len(leaders),
        "readyReplicas": len([pod for pod in leaders if ready(pod)]),
        "updatedReplicas": len(fresh),
        "hpaPodSelector": f"{NAME}={item['metadata']['name']},{WORKER}=0",
        "conditions": [available | {"lastTransitionTime": item["metadata"]["creationTimestamp"]}],
    }
