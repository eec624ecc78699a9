"""Why a pod does not run, in a sentence that a person can act on.

Invariants: pure; every message names the pod and what to change; a message never repeats an environment
variable.
Knows nothing of which pods matter: it is shown one at a time.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from stoker_operator.observe.rollout import is_pending
from stoker_operator.plan.wording import sentence, short
from stoker_operator.spec.service import FetchedModel, FetchFailure, InferenceService, parse_fetch_result

Object = Mapping[str, Any]
# The end of a log stands in for last words: of its lines, what `stoker serve` logs in its daily business says nothing.
_CHATTER = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ (DEBUG|INFO|WARNING) ")
_LOGGED = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ (ERROR|CRITICAL) (\[[^]]*\] )?[\w.]+: ")
_QUIET = ("debug", "info", "warning")
# So much of a log's end stands in for last words, in bytes.
_LOG_TAIL = 2048
# A container that ran so long is no crash loop: the kubelet forgets its back-off then, too.
_STEADY = timedelta(minutes=10)
# By number; those of real time have no names.
_SIGNALS = {each.value: each.name for each in signal.Signals}
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")

_ADVICE = {
    "TokenRejected": "Put a token with access into the Secret that spec.model.secretRef names.",
    "VolumeFull": "Raise spec.cache.pvc.size, or name fewer files in spec.model.files. Where the storage class cannot "
    "grow volumes, the new size then takes: kubectl delete pvc {claim}; the volume is made anew.",
    "RevisionNotFound": "Check {where}.revision.",
    "ModelNotFound": "Check {where}.uri; a private one needs spec.model.secretRef.",
}
_STORE_ADVICE = {
    "TokenRejected": "Put keys with access into the Secret that spec.model.secretRef names, or name a ServiceAccount "
    "that has access in spec.model.serviceAccountName.",
    "ModelNotFound": "Check {where}.uri and spec.model.endpoint.",
}
_REGISTRY_ADVICE = {
    "TokenRejected": "Name a Secret of type kubernetes.io/dockerconfigjson, whose login has access, in "
    "spec.model.secretRef.",
    "ModelNotFound": "Check {where}.uri.",
}
_FOLDER_ADVICE = {"VolumeFull": "Raise spec.cache.pvc.size, or name fewer files in spec.model.files."}


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with a pod. `permanent`: waiting alone does not help, somebody has to change something.

    `advice` holds good while the pod is there; `said` stays true when it is gone. `lacking`: the resources of which no
    node that would do has enough.
    """

    reason: str
    said: str
    permanent: bool
    advice: str = ""
    lacking: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """What a condition says."""
        return f"{self.said} {self.advice}".rstrip()


def first_trouble(pods: Iterable[Object]) -> Trouble | None:
    """The gravest trouble among pods: a permanent one if there is any."""
    found = [trouble for trouble in map(trouble_of, pods) if trouble is not None]
    return next((trouble for trouble in found if trouble.permanent), found[0] if found else None)


def trouble_of(pod: Object) -> Trouble | None:
    """What keeps this pod from running; None when it runs, starts normally or ended well."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    # A scheduler that hears too late that a binding succeeded says that it failed, of a pod that has its node and runs.
    waits = is_pending(pod)
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False" and waits:
            return _unschedulable(name, str(condition.get("message", "")))
    if missing := _missing_claims(pod):
        said = f"Pod {name} waits for a node: what it claims is not there ({' and '.join(missing)})."
        return Trouble("Unschedulable", said, False, "See resources.claims, and the events of the pod.")
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            init = kind == "initContainerStatuses"
            trouble = _container_trouble(name, container, init=init, was_ready=not init and _was_ready(pod, container))
            if trouble is not None:
                return _of_the_model(pod, container, trouble) if trouble.reason == "ImagePullFailed" else trouble
    if _lost(pod):
        node = pod["spec"]["nodeName"]
        text = f"Pod {name} is not ready although its containers are: node {node} does not report, or a readiness gate "
        return Trouble("PodNotReady", f"{text}is not met.", False, f"More: kubectl describe node {node}.")
    if status.get("phase") == "Failed" and status.get("reason"):
        message = f"Pod {name} was ended: {status['reason']}: {short(str(status.get('message', '')))}"
        return Trouble(str(status["reason"]), message, False)
    return None


def fetch_advice(service: InferenceService, reason: str) -> str:
    """What to do about a fetch that failed for this reason, "" = nothing is known; `{claim}` stands for the volume,
    `{where}` for the field that names the source.
    """
    known = _ADVICE | (_STORE_ADVICE if service.model.in_store else {})
    known |= _REGISTRY_ADVICE if service.model.scheme == "oci" else {}
    known |= {} if service.cache.has_volume else _FOLDER_ADVICE
    return known.get(reason, "")


def fetch_outcome(pods: Sequence[Object], name: str = "fetch") -> FetchedModel | FetchFailure | None:
    """What container `name` of the newest finished pod of a Job reported; None while none did."""
    for pod in sorted(pods, key=lambda item: str(item["metadata"].get("creationTimestamp", "")), reverse=True):
        for container in pod.get("status", {}).get("containerStatuses") or ():
            ended = (container.get("state") or {}).get("terminated")
            if container["name"] != name or not ended:
                continue
            outcome = parse_fetch_result(str(ended.get("message", "")))
            if outcome is not None:
                return outcome
            if ended.get("exitCode"):
                return FetchFailure("FetchFailed", f"Pod {pod['metadata']['name']}: {_ending(ended)}")
    return None


def first_ending(pods: Iterable[Object]) -> str:
    """How the first container ended, of those of these pods that should have gone on; "" when none did. Of pods that
    end together, the first one is the cause.
    """
    found = []
    for pod in pods:
        for kind in ("initContainerStatuses", "containerStatuses"):
            for container in pod.get("status", {}).get(kind) or ():
                for state in (container.get("state") or {}, container.get("lastState") or {}):
                    ended = state.get("terminated") or {}
                    if ended.get("exitCode"):
                        found.append((str(ended.get("finishedAt", "")), str(pod["metadata"]["name"]), container, ended))
    if not found:
        return ""
    _, name, container, ended = min(found, key=lambda item: item[:2])
    with_ = "" if ended.get("reason") == "OOMKilled" else "with "
    return f"pod {name}, container {container['name']}, ended {with_}{_ending(ended)}"


def lacks_secret(pod: Object, name: str) -> bool:
    """Whether a container of the pod waits for a Secret of this name, which is not there."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    waiting = [(item.get("state") or {}).get("waiting") or {} for item in statuses]
    words = [str(item.get("message", "")) for item in waiting if item.get("reason") in _CONFIG]
    return any(f'secret "{name}" not found' in text for text in words)


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


def _lost(pod: Object) -> bool:
    """Whether a pod is not ready for a reason that lies in none of its containers."""
    containers = pod.get("status", {}).get("containerStatuses") or ()
    conditions = pod.get("status", {}).get("conditions") or ()
    unready = any(item["type"] == "Ready" and item["status"] != "True" for item in conditions)
    return unready and bool(containers) and all(item.get("ready") for item in containers)


def _container_trouble(pod: str, container: Object, *, init: bool, was_ready: bool) -> Trouble | None:
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason, text = str(waiting.get("reason", "")), short(str(waiting.get("message", "")))
    where = f"Pod {pod}, container {container['name']}"
    if reason in _PULL:
        image = container.get("image", "")
        advice = "Check spec.runtime.image, the registry and the ServiceAccount's imagePullSecrets."
        return Trouble("ImagePullFailed", f"{where}: image {image} cannot be pulled: {text}. {advice}", True)
    if reason in _CONFIG:
        return _refused(where, text)
    ended = None if was_ready else _unexpected_end(container, init=init)
    if ended is not None:
        return _restarting(pod, container, ended, looping=reason == "CrashLoopBackOff")
    if was_ready and container["name"] == "engine":
        text = f"Pod {pod} was ready and is not any more: its engine does not answer /ready with 200."
        asleep = "One that was put to sleep (POST /sleep) waits for POST /wake_up."
        more = f"It is restarted once it fails /health too. {asleep} More: kubectl logs {pod} -c engine."
        return Trouble("PodNotReady", text, False, more)
    return None


def _of_the_model(pod: Object, container: Object, trouble: Trouble) -> Trouble:
    """The same where the image that cannot be pulled is the one that the pod mounts for its model."""
    text = str(container["state"]["waiting"].get("message", ""))
    for volume in pod.get("spec", {}).get("volumes") or ():
        image = (volume.get("image") or {}).get("reference", "")
        if image and image in text and image != container.get("image"):
            said = f"Pod {pod['metadata']['name']}: the model's image {image} cannot be pulled: {short(text)}."
            advice = "Check spec.model.uri, that nodes reach the registry, and the login of spec.model.secretRef."
            return Trouble("ImagePullFailed", f"{said} {advice}", True)
    return trouble


def _refused(where: str, text: str) -> Trouble:
    """The kubelet could not make the container."""
    missing = re.search(r'(secret|configmap) "([^"]+)" not found', text)
    missing_key = re.search(r"couldn't find key (\S+) in (Secret|ConfigMap) (\S+)", text)
    if missing:
        return Trouble("ReferenceMissing", f"{where}: {missing[1]} {missing[2]} does not exist. Create it.", True)
    if missing_key:
        return Trouble("ReferenceMissing", f"{where}: {missing_key[2]} {missing_key[3]} has no such key. "
                       f"Add key {missing_key[1]}.", True)  # fmt: skip
    return Trouble("ContainerRefused", f"{where}: {sentence(text)}", True)


def _was_ready(pod: Object, container: Object) -> bool:
    """Whether a container that runs and is not ready was ready since its start. While one starts, the pod is unready
    since before that.
    """
    running = (container.get("state") or {}).get("running")
    since = _unready_since(pod)
    if not running or container.get("ready") or not since or not running.get("startedAt"):
        return False
    return datetime.fromisoformat(since) > datetime.fromisoformat(str(running["startedAt"]))


def _unready_since(pod: Object) -> str:
    for item in pod.get("status", {}).get("conditions") or ():
        if item["type"] == "Ready" and item["status"] != "True":
            return str(item.get("lastTransitionTime", ""))
    return ""


def _unexpected_end(container: Object, *, init: bool) -> Object | None:
    """How a container ended that should have gone on (or, an init container, should have succeeded) and is not back
    where it was; None when there is no such end.
    """
    state = container.get("state") or {}
    now, before = state.get("terminated"), (container.get("lastState") or {}).get("terminated")
    if now:
        return now if now.get("exitCode", 0) else None
    if not before or container.get("ready"):
        return None
    # An init container runs again whenever the pod's sandbox is new: only a failure is one.
    return before if before.get("exitCode", 0) or not init else None


def _restarting(pod: str, container: Object, ended: Object, *, looping: bool) -> Trouble:
    """A container that ended and starts again: once, or over and over."""
    name, where = container["name"], f"Pod {pod}, container {container['name']}"
    if name == "verify" and isinstance(parse_fetch_result(str(ended.get("message", ""))), FetchFailure):
        return Trouble("CacheCorrupt", f"{where} found the cache changed: {sentence(_ending(ended))}", False)
    ends = int(container.get("restartCount", 0)) + ("terminated" in (container.get("state") or {}))
    looping = looping or (ends > 1 and _brief(ended))
    how = _ending(ended) if ended.get("reason") == "OOMKilled" else f"with {_ending(ended)}"
    text = f"{where} ended {ends} times, the last time {how}" if looping else f"{where} ended {how}"
    more = "" if looping else "The container starts again by itself. "
    more += f"More: kubectl logs {pod} -c {name} --previous."
    reason = "CrashLoop" if looping else "PodRestarting"
    return Trouble("OutOfMemory" if ended.get("reason") == "OOMKilled" else reason, sentence(text), looping, more)


def _brief(ended: Object) -> bool:
    """Whether a container ended so soon after its start that the kubelet, too, takes it for a loop."""
    started, finished = ended.get("startedAt"), ended.get("finishedAt")
    if not started or not finished:
        return False
    return datetime.fromisoformat(str(finished)) - datetime.fromisoformat(str(started)) < _STEADY


def _ending(ended: Object) -> str:
    """How a container ended, in its own last words where it left some."""
    outcome = parse_fetch_result(str(ended.get("message", "")))
    if isinstance(outcome, FetchFailure):
        return f"{outcome.reason}: {short(outcome.message)}"
    spoken = _last_words(str(ended.get("message", "")))
    last = f": {short(spoken)}" if spoken else ""
    if ended.get("reason") == "OOMKilled":
        return f"out of memory{last}. Raise spec.resources.memory or lower runtime.contextLength"
    code = int(ended.get("exitCode", 0))
    if not code:
        return "exit code 0, as one that is told to end because it failed its startup or liveness probe"
    by = f" ({_SIGNALS[code - 128]})" if code - 128 in _SIGNALS else ""
    return f"exit code {code}{by}{last}"


def _last_words(message: str) -> str:
    """The last line that says something; "" when there is none."""
    lines = message.splitlines()
    if len(message.encode()) >= _LOG_TAIL and len(lines) > 1:
        del lines[0]  # the kubelet took the log's end, and cut into a line
    for line in reversed([line.strip() for line in lines if line.strip()]):
        entry = _json_entry(line)
        if entry.get("level") in _QUIET or _CHATTER.match(line):
            continue
        return str(entry.get("message") or _LOGGED.sub("", line))
    return ""


def _json_entry(line: str) -> Mapping[str, Any]:
    """A line of a log that is written as JSON; {} for any other."""
    try:
        entry = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) and "level" in entry else {}


def _missing_claims(pod: Object) -> list[str]:
    """What a pod claims and does not have, so that the scheduler does not look at it, and says nothing of it."""
    spec, status = pod.get("spec", {}), pod.get("status", {})
    looked_at = any(each["type"] == "PodScheduled" for each in status.get("conditions") or ())
    if looked_at or spec.get("nodeName") or not is_pending(pod):
        return []
    made = {each["name"] for each in status.get("resourceClaimStatuses") or () if each.get("resourceClaimName")}
    asked = [each for each in spec.get("resourceClaims") or () if each["name"] not in made]
    return [
        f"ResourceClaimTemplate {each['resourceClaimTemplateName']}"
        if each.get("resourceClaimTemplateName")
        else f"ResourceClaim {each.get('resourceClaimName')}"
        for each in asked
    ]


def _unschedulable(pod: str, text: str) -> Trouble:
    # What the scheduler thought of evicting others is nothing that the reader can change.
    text = re.split(r" (?:no new claims to deallocate|preemption:)", text)[0]
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
    elif "claim" in text:
        what, advice = "no node has devices for what it claims", "See resources.claims, and what holds the devices"
    elif "scheduling gates" in text:
        what, advice = "its queue has not admitted it", "See placement.queueName and the queue's quota"
    elif "were unschedulable" in text:
        what, advice = "every node that would do is cordoned", "Run kubectl uncordon, or add a node"
    else:
        what, advice = "the scheduler found no node", "See the scheduler's own words"
    said = f"Pod {pod} waits for a node: {what}. {advice}. ({short(text)})"
    return Trouble("Unschedulable", said, False, lacking=tuple(lacking))
