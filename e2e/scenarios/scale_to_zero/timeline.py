"""When each step of a service's waking was seen, as watches tell: a line of seconds after a moment.

Invariants: a step has the time at which its watch told of it first, by this machine's clock: no clocks are compared,
and Kubernetes' own times, which are whole seconds, are not needed.
Knows nothing of who asked and of what he was answered.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from e2e.scenarios.kube import Kube, eventually

Object = Mapping[str, Any]
_WATCHED = ("infsvc", "deployments", "pods", "endpointslices")


class Timeline:
    """What was seen of service `name`. Steps seen before `begin` is called are those of an earlier life of it."""

    def __init__(self, kube: Kube, name: str) -> None:
        self._kube, self._name = kube, name
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._seen: dict[str, float] = {}
        self._heard: set[str] = set()
        self._wake: object = None
        self._watches: list[subprocess.Popen[str]] = []

    def begin(self, moment: float) -> None:
        """From a moment of the monotonic clock on."""
        with self._lock:
            self._began = moment
            self._seen = {step: at for step, at in self._seen.items() if at >= moment}

    def told(self, ended: float) -> str:
        """The steps in their order, and the end, in seconds after the beginning."""
        with self._lock:
            steps = sorted(self._seen.items(), key=lambda step: step[1])
        return ", ".join(f"{name} {at - self._began:.1f}" for name, at in [*steps, ("answered", ended)])

    def _note(self, document: Object) -> None:
        now = time.monotonic()
        with self._lock:
            for step in (*_steps(document, self._name), *self._asked(document)):
                self._seen.setdefault(step, now)
            self._heard.add(document["kind"])

    def _asked(self, document: Object) -> Iterator[str]:
        """A new wish to wake: an old one stays in the status."""
        if document["kind"] == "InferenceService" and document["metadata"]["name"] == self._name:
            wake = (document.get("status") or {}).get("wake")
            if wake != self._wake and "InferenceService" in self._heard:
                yield "asked to wake"
            self._wake = wake

    def _read(self, watch: subprocess.Popen[str]) -> None:
        """Documents come one after the other, each on lines of its own that end with a closing brace at their start."""
        lines: list[str] = []
        for line in watch.stdout or ():
            lines = [line] if line.startswith("{") else [*lines, line]
            if line.startswith("}"):
                self._note(json.loads("".join(lines)))

    @classmethod
    @contextmanager
    def followed(cls, kube: Kube, name: str) -> Iterator[Timeline]:
        """While it lasts, the watches run."""
        timeline, readers = cls(kube, name), []
        for kind in _WATCHED:
            watch = kube.start("get", kind, "--watch", "-o=json")
            timeline._watches.append(watch)
            readers.append(threading.Thread(target=timeline._read, args=(watch,), daemon=True))
            readers[-1].start()
        try:
            # There may be no pod that its watch could tell of.
            eventually("the watches tell", lambda: len(timeline._heard) >= len(_WATCHED) - 1, 30, every=0.1)
            yield timeline
        finally:
            for watch in timeline._watches:
                watch.terminate()
            for reader in readers:
                reader.join(30)
            for watch in timeline._watches:
                watch.communicate()


def _steps(document: Object, name: str) -> Iterator[str]:
    """The steps that a document of this service shows to be done."""
    kind, meta = document["kind"], document["metadata"]
    if kind == "Deployment" and meta["name"] == name and document["spec"].get("replicas"):
        yield "scaled"
    elif kind == "Pod" and "deletionTimestamp" not in meta and meta["name"].startswith(f"{name}-"):
        yield from _pod_steps(document)
    elif kind == "EndpointSlice" and _of_pods(meta, name) and _leads_somewhere(document):
        yield "endpoint ready"


def _of_pods(meta: Object, name: str) -> bool:
    """Whether Kubernetes fills this EndpointSlice from the service's pods."""
    labels = meta.get("labels") or {}
    manager = labels.get("endpointslice.kubernetes.io/managed-by", "")
    return bool(labels.get("kubernetes.io/service-name") == name and manager.startswith("endpointslice-controller"))


def _leads_somewhere(found: Object) -> bool:
    return any((each.get("conditions") or {}).get("ready") for each in found.get("endpoints") or ())


def _pod_steps(pod: Object) -> Iterator[str]:
    if (pod["metadata"].get("labels") or {}).get("app.kubernetes.io/component") != "engine":
        return
    yield "pod made"
    status = pod.get("status", {})
    true = {each["type"] for each in status.get("conditions") or () if each["status"] == "True"}
    if "PodScheduled" in true:
        yield "scheduled"
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state = each.get("state") or {}
        if "running" in state or "terminated" in state:
            yield f"{each['name']} runs"
        if "terminated" in state:
            yield f"{each['name']} ended"
        if each["name"] == "engine" and each.get("started"):
            yield "engine said to have started"
    if "Ready" in true:
        yield "pod ready"
