"""Kubernetes' controllers of a walk of weeks: Deployments, ReplicaSets, Jobs, autoscalers and volumes.

Invariants: level-triggered as their originals, and by their rules: how many pods a rollout may add and take away, when
it has made no progress for too long, how often a Job tries, and that an autoscaler leaves a scale of 0 alone.
Knows nothing of InferenceServices and of nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from tests.operator.weeks.store import Store, is_going

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Object
from stoker_operator.manifests.identity import short_hash
from stoker_operator.observe.rollout import REVISION, TEMPLATE_HASH, is_finished, is_ready

HPA_SECONDS = 15
CALM_SECONDS = 300


class Controllers:
    """Use `sync` until it changes nothing; `loads` says how many pods the requests of a service would keep busy, of
    others 1.
    """

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        self._store, self._clock = store, clock
        self._numbers = count(1)
        self._progress: dict[str, tuple[Any, datetime]] = {}
        self._scaled: dict[str, datetime] = {}
        self.loads: dict[str, int] = {}

    def sync(self) -> None:
        """Do what is to be done now."""
        store = self._store
        store.collect_garbage()
        for claim in store.of(kinds.CLAIM):
            store.say(claim, phase="Bound")
        for scaler in store.of(kinds.AUTOSCALER):
            self._scale(scaler)
        for deployment in store.of(kinds.DEPLOYMENT):
            self._roll(deployment)
        for each in store.of(kinds.REPLICA_SET):
            self._replicate(each)
        for job in store.of(kinds.JOB):
            self._try(job)

    def due(self) -> list[datetime]:
        """When time alone changes something."""
        found = [at + timedelta(seconds=s) for at in self._scaled.values() for s in (HPA_SECONDS, CALM_SECONDS)]
        for item in self._store.of(kinds.DEPLOYMENT):
            known = self._progress.get(item["metadata"]["uid"])
            if known is not None and known[0] != "complete":
                found.append(known[1] + timedelta(seconds=item["spec"]["progressDeadlineSeconds"] + 1))
        for job in self._store.of(kinds.JOB):
            found += [at for at in (self._again_at(job), self._ttl(job)) if at is not None]
        return found

    # Deployments.

    def _roll(self, item: Object) -> None:
        store, meta, spec = self._store, item["metadata"], item["spec"]
        if is_going(item):
            return
        sets = store.owned_by(kinds.REPLICA_SET, item)
        key = short_hash(spec["template"])
        current = next((each for each in sets if _hash(each) == key), None)
        number = max((_number(each) for each in sets), default=0)
        if spec.get("paused"):
            current = current or next((each for each in sets if _number(each) == number), None)
        elif current is None or _number(current) != number:
            current = self._newest(item, current, key, number + 1)
            sets = store.owned_by(kinds.REPLICA_SET, item)
            self._progress[meta["uid"]] = (None, self._clock())
        fresh = {**meta, "annotations": {**meta.get("annotations", {})}}
        if current is not None:
            fresh["annotations"][REVISION] = str(_number(current))
        if fresh != meta:
            item = store.put({**item, "metadata": fresh})
        if current is not None:
            self._scale_sets(item, current, [each for each in sets if _hash(each) != _hash(current)])
            self._clean(item, current)
        conditions = self._judge(item, current)
        store.say(item, observedGeneration=meta["generation"], conditions=conditions)

    def _newest(self, item: Object, known: Object | None, key: str, number: int) -> Object:
        meta, template = item["metadata"], item["spec"]["template"]
        head = {
            "name": f"{meta['name']}-{key}",
            "namespace": meta["namespace"],
            "labels": {**template["metadata"]["labels"], TEMPLATE_HASH: key},
            "annotations": {REVISION: str(number)},
            "ownerReferences": [_owner(item)],
        }
        if known is not None:
            there = known["metadata"]
            return self._store.put({**known, "metadata": {**there, "annotations": head["annotations"]}})
        body = {"replicas": 0, "template": template}
        return self._store.add({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": head, "spec": body})

    def _scale_sets(self, item: Object, current: Object, old: list[Object]) -> None:
        """As its own reconcileNewReplicaSet and reconcileOldReplicaSets count."""
        wanted, strategy = int(item["spec"]["replicas"]), item["spec"]["strategy"]
        if not wanted:
            for each in (current, *old):
                self._size(each, 0)
            return
        if item["spec"].get("paused"):
            if not any(_size(each) for each in old):
                self._size(current, wanted)
            return
        if strategy["type"] == "Recreate":
            for each in old:
                self._size(each, 0)
            left = [pod for each in old for pod in self._store.owned_by(kinds.POD, each) if not is_finished(pod)]
            self._size(current, wanted if not left else _size(current))
            return
        surge, unavailable = (strategy["rollingUpdate"][key] for key in ("maxSurge", "maxUnavailable"))
        # Fewer are wanted than there were: its own scale() takes them at once, of the old ones first here.
        excess = sum(map(_size, (current, *old))) - (wanted + surge)
        for index, each in enumerate(old):
            taken = min(_size(each), max(excess, 0))
            excess -= taken
            old[index] = self._size(each, _size(each) - taken)
        total = sum(map(_size, (current, *old)))
        room = max(0, wanted + surge - total)
        current = self._size(current, min(wanted, _size(current) + room))
        total = sum(map(_size, (current, *old)))
        ready_new = self._ready(current)
        spare = total - (wanted - unavailable) - (_size(current) - ready_new)
        for each in old:
            sick = min(_size(each) - self._ready(each), max(spare, 0))
            spare -= max(sick, 0)
            self._size(each, _size(each) - max(sick, 0))
        spare = sum(map(self._ready, (current, *old))) - (wanted - unavailable)
        for each in (self._store.find(kinds.REPLICA_SET, each["metadata"]["name"]) for each in old):
            assert each is not None
            taken = min(_size(each), max(spare, 0))
            spare -= taken
            self._size(each, _size(each) - taken)

    def _clean(self, item: Object, current: Object) -> None:
        """As its own cleanupDeployment, which is asked once a rollout is complete, or while it is paused: at a scale of
        0 as at any other.
        """
        sets = self._store.owned_by(kinds.REPLICA_SET, item)
        old = sorted((each for each in sets if _hash(each) != _hash(current)), key=_number)
        counts = {self._ready(current), len(self._live(current)), int(item["spec"]["replicas"])}
        complete = len(counts) == 1 and not any(map(self._live, old))
        if not (complete or item["spec"].get("paused")):
            return
        for each in old[: max(len(old) - int(item["spec"].get("revisionHistoryLimit", 10)), 0)]:
            if not _size(each) and not self._live(each):
                self._store.forget(each)

    def _size(self, item: Object, wanted: int) -> Object:
        return self._store.patch_spec(item, {"replicas": wanted})

    def _ready(self, item: Object) -> int:
        return sum(is_ready(pod) for pod in self._live(item))

    def _live(self, item: Object) -> list[Object]:
        return [pod for pod in self._store.owned_by(kinds.POD, item) if not is_going(pod) and not is_finished(pod)]

    def _judge(self, item: Object, current: Object | None) -> list[Object]:
        """The condition Progressing."""
        uid, now = item["metadata"]["uid"], self._clock()
        if current is None or item["spec"].get("paused"):
            return []
        others = sum(
            len(self._live(each))
            for each in self._store.owned_by(kinds.REPLICA_SET, item)
            if _hash(each) != _hash(current)
        )
        seen = (len(self._live(current)), self._ready(current), others)
        known, since = self._progress.get(uid, (None, now))
        if known == "complete" or (seen[:2] == (item["spec"]["replicas"],) * 2 and not others):
            self._progress[uid] = ("complete", since)
            return [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]
        if known == "late":
            moved = False
        else:
            moved = known != seen
            self._progress[uid] = (seen, now if moved else since)
        late = now - since > timedelta(seconds=item["spec"]["progressDeadlineSeconds"]) and not moved
        if late:
            self._progress[uid] = ("late", since)
            text = f"ReplicaSet {current['metadata']['name']} has timed out progressing."
            said = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": text}
            return [said]
        return [{"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated"}]

    # ReplicaSets.

    def _replicate(self, item: Object) -> None:
        if is_going(item):
            return
        live = self._live(item)
        for _ in range(_size(item) - len(live)):
            self._make_pod(item, _hash(item))
        spare = len(live) - _size(item)
        for pod in sorted(live, key=lambda pod: (is_ready(pod), bool(pod["spec"].get("nodeName"))))[: max(spare, 0)]:
            self._store.remove(pod)

    def _make_pod(self, owner: Object, key: str = "") -> None:
        meta, template = owner["metadata"], owner["spec"]["template"]
        labels = {**template["metadata"].get("labels", {}), **({TEMPLATE_HASH: key} if key else {})}
        head = {"name": f"{meta['name']}-{next(self._numbers)}", "namespace": meta["namespace"], "labels": labels}
        head["ownerReferences"] = [_owner(owner)]
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": head, "spec": template["spec"]}
        self._store.add({**body, "status": {"phase": "Pending"}})

    # Jobs.

    def _try(self, job: Object) -> None:
        if is_going(job):
            return
        gone = self._ttl(job)
        if gone is not None and self._clock() >= gone:
            self._store.forget(job)
            return
        if job.get("status", {}).get("conditions"):
            return
        pods = self._store.owned_by(kinds.POD, job)
        failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
        limit = job["spec"].get("activeDeadlineSeconds")
        late = limit and self._clock() > _time(job["metadata"]["creationTimestamp"]) + timedelta(seconds=limit)
        if any(pod["status"].get("phase") == "Succeeded" for pod in pods):
            self._finish(job, "Complete")
        elif late or len(failed) > job["spec"]["backoffLimit"] or any(map(_permanent, failed)):
            self._finish(job, "Failed")
            for pod in pods:
                if not is_finished(pod):
                    self._store.remove(pod)
        elif all(map(is_finished, pods)) and not (self._again_at(job) or self._clock()) > self._clock():
            self._make_pod(job)

    def _again_at(self, job: Object) -> datetime | None:
        """When it tries again after a failure; of one that may run for so long only, when that is over."""
        if job.get("status", {}).get("conditions"):
            return None
        pods = self._store.owned_by(kinds.POD, job)
        ends = [pod["status"]["ended"] for pod in pods if pod["status"].get("phase") == "Failed"]
        if pods and all(map(is_finished, pods)):
            return max(map(_time, ends)) + timedelta(seconds=10 * 2 ** (len(ends) - 1))
        limit = job["spec"].get("activeDeadlineSeconds")
        return _time(job["metadata"]["creationTimestamp"]) + timedelta(seconds=limit + 1) if limit else None

    def _ttl(self, job: Object) -> datetime | None:
        limit, said = job["spec"].get("ttlSecondsAfterFinished"), job.get("status", {}).get("conditions")
        return _time(said[0]["lastTransitionTime"]) + timedelta(seconds=limit) if limit and said else None

    def _finish(self, job: Object, kind: str) -> None:
        said = {"type": kind, "status": "True", "lastTransitionTime": self._store.stamp()}
        self._store.say(job, conditions=[said])

    # Autoscalers.

    def _scale(self, scaler: Object) -> None:
        """Every so often, by the load, and down no sooner than it was for a while."""
        uid, now, spec = scaler["metadata"]["uid"], self._clock(), scaler["spec"]
        target = self._store.find(kinds.DEPLOYMENT, spec["scaleTargetRef"]["name"])
        if is_going(scaler) or target is None or is_going(target):
            self._scaled.pop(uid, None)
            return
        there = int(target["spec"]["replicas"])
        if not there:
            self._scaled.pop(uid, None)
            said = {"type": "ScalingActive", "status": "False", "reason": "ScalingDisabled", "message": "scale is 0"}
            self._store.say(scaler, conditions=[said], desiredReplicas=0)
            return
        sets = self._store.owned_by(kinds.REPLICA_SET, target)
        load = self.loads.get(target["metadata"]["name"], 1)
        wanted = min(max(load, spec["minReplicas"]), spec["maxReplicas"])
        if not any(self._ready(each) for each in sets):
            wanted = min(max(there, spec["minReplicas"]), spec["maxReplicas"])
            said = {"type": "ScalingActive", "status": "False", "reason": "FailedGetPodsMetric", "message": "no pods"}
        else:
            said = {"type": "ScalingActive", "status": "True", "reason": "ValidMetricFound", "message": "it can"}
        self._store.say(scaler, conditions=[said], desiredReplicas=wanted)
        if wanted == there:
            self._scaled.pop(uid, None)
            return
        since = self._scaled.setdefault(uid, now)
        if now - since >= timedelta(seconds=HPA_SECONDS if wanted > there else CALM_SECONDS) or (
            not spec["minReplicas"] <= there <= spec["maxReplicas"]
        ):
            self._scaled.pop(uid, None)
            self._store.patch_spec(target, {"replicas": wanted})


def _owner(item: Object) -> Object:
    meta = item["metadata"]
    return {"apiVersion": item["apiVersion"], "kind": item["kind"], "name": meta["name"], "uid": meta["uid"]}


def _hash(item: Object) -> str:
    return str(item["metadata"]["labels"][TEMPLATE_HASH])


def _number(item: Object) -> int:
    return int(item["metadata"]["annotations"][REVISION])


def _size(item: Object) -> int:
    return int(item["spec"]["replicas"])


def _permanent(pod: Object) -> bool:
    """Whether a Job gives up over it at once: its podFailurePolicy's exit code."""
    states = (each["state"].get("terminated") or {} for each in pod["status"].get("containerStatuses") or ())
    return any(state.get("exitCode") == 3 for state in states)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
