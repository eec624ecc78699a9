"""Why a pod does not run, in a sentence that a person can act on.

Invariants: pure; every message names the pod and what to change; a message never repeats an environment
variable.
Knows nothing of which pods matter: it is shown one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker_operator.spec import FetchedModel, FetchFailure, parse_fetch_result

Object = Mapping[str, Any]
_LONGEST = 400
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with a pod. `permanent`: waiting alone does not help, somebody has to change something."""

    reason: str
    message: str
    permanent: bool


def first_trouble(pods: Iterable[Object]) -> Trouble | None:
    """The gravest trouble among pods: a permanent one if there is any."""
    found = [trouble for trouble in map(trouble_of, pods) if trouble is not None]
    return next((trouble for trouble in found if trouble.permanent), found[0] if found else None)


def trouble_of(pod: Object) -> Trouble | None:
    """What keeps this pod from running; None when it runs, starts normally or ended well."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _unschedulable(name, str(condition.get("message", "")))
    for container in _container_statuses(pod):
        trouble = _container_trouble(name, container)
        if trouble is not None:
            return trouble
    if status.get("phase") == "Failed" and status.get("reason"):
        message = f"Pod {name} was ended: {status['reason']}: {_short(str(status.get('message', '')))}"
        return Trouble(str(status["reason"]), message, False)
    return None


def fetch_outcome(pods: Sequence[Object]) -> FetchedModel | FetchFailure | None:
    """What the newest finished prefetch pod reported; None while none did."""
    for pod in sorted(pods, key=lambda item: str(item["metadata"].get("creationTimestamp", "")), reverse=True):
        for container in pod.get("status", {}).get("containerStatuses") or ():
            ended = (container.get("state") or {}).get("terminated")
            if container["name"] != "fetch" or not ended:
                continue
            outcome = parse_fetch_result(str(ended.get("message", "")))
            if outcome is not None:
                return outcome
            if ended.get("exitCode"):
                return FetchFailure("FetchFailed", f"Pod {pod['metadata']['name']}: {_ending(ended)}")
    return None


def verify_failure(pods: Iterable[Object]) -> tuple[FetchFailure, str] | None:
    """(what the verifying init container found, when it ended) for the newest engine pod whose cache is not
    right.
    """
    newest: tuple[FetchFailure, str] | None = None
    for pod in pods:
        for container in pod.get("status", {}).get("initContainerStatuses") or ():
            if container["name"] != "verify":
                continue
            for state in (container.get("state") or {}, container.get("lastState") or {}):
                ended = state.get("terminated")
                outcome = parse_fetch_result(str(ended.get("message", ""))) if ended else None
                when = str(ended.get("finishedAt", "")) if ended else ""
                if isinstance(outcome, FetchFailure) and (newest is None or when > newest[1]):
                    newest = (outcome, when)
    return newest


def _container_statuses(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _container_trouble(pod: str, container: Object) -> Trouble | None:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting = state.get("waiting") or {}
    reason, text = str(waiting.get("reason", "")), _short(str(waiting.get("message", "")))
    where = f"Pod {pod}, container {container['name']}"
    if reason in _PULL:
        image = container.get("image", "")
        advice = "Check spec.runtime.image, the registry and the ServiceAccount's imagePullSecrets."
        return Trouble("ImagePullFailed", f"{where}: image {image} cannot be pulled: {text}. {advice}", True)
    if reason in _CONFIG:
        missing = re.search(r'(secret|configmap) "([^"]+)" not found', text)
        missing_key = re.search(r"couldn't find key (\S+) in (Secret|ConfigMap) (\S+)", text)
        if missing:
            return Trouble("ReferenceMissing", f"{where}: {missing[1]} {missing[2]} does not exist. Create it.", True)
        if missing_key:
            return Trouble("ReferenceMissing", f"{where}: {missing_key[2]} {missing_key[3]} has no such key. "
                           f"Add key {missing_key[1]}.", True)  # fmt: skip
        return Trouble("ContainerRefused", f"{where}: {text}", True)
    ended = state.get("terminated") or (last.get("terminated") if reason == "CrashLoopBackOff" else None)
    if ended and ended.get("exitCode", 0) != 0:
        again = int(container.get("restartCount", 0))
        permanent = reason == "CrashLoopBackOff" or again > 1
        ending = f"{where} ended {again + bool(state.get('terminated'))} times: {_ending(ended)}"
        return Trouble("OutOfMemory" if ended.get("reason") == "OOMKilled" else "CrashLoop", ending, permanent)
    return None


def _ending(ended: Object) -> str:
    outcome = parse_fetch_result(str(ended.get("message", "")))
    if isinstance(outcome, FetchFailure):
        return f"{outcome.reason}: {_short(outcome.message)}"
    lines = [line for line in str(ended.get("message", "")).splitlines() if line.strip()]
    last = f": {_short(lines[-1].strip())}" if lines else ""
    if ended.get("reason") == "OOMKilled":
        return f"out of memory{last}. Raise spec.resources.memory or lower runtime.contextLength"
    return f"exit code {ended.get('exitCode')}{last}"


def _unschedulable(pod: str, text: str) -> Trouble:
    lacking = sorted(set(re.findall(r"Insufficient ([a-z0-9./-]+[a-z0-9])", text)))
    if lacking:
        what = f"no node has enough {' and '.join(lacking)} free"
        advice = "Free some, add a node, or ask for less in spec.resources"
    elif "PersistentVolumeClaim" in text:
        what, advice = (
            "its volume is not bound",
            "Check cache.pvc.storageClassName and the storage provisioner",
        )
    elif "affinity" in text or "selector" in text:
        what = "no node matches"
        advice = "Check placement.nodeSelector, resources.gpuProducts and the node of the cache volume"
    elif "taint" in text:
        what, advice = "every node that would do has a taint", "Add placement.tolerations"
    elif "scheduling gates" in text:
        what, advice = "its queue has not admitted it", "See placement.queueName and the queue's quota"
    elif "were unschedulable" in text:
        what, advice = "every node that would do is cordoned", "Run kubectl uncordon, or add a node"
    else:
        what, advice = "the scheduler found no node", "See the scheduler's own words"
    return Trouble("Unschedulable", f"Pod {pod} waits for a node: {what}. {advice}. ({_short(text)})", False)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
