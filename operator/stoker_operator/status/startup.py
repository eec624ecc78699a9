"""How long the newest revision took to start, by phases: what its first pod's own times say.

Invariants: pure; measured once for a revision, when it is rolled out, and kept: a pod that restarts later changes
nothing. A phase whose times nobody kept is left out. Whole seconds, as Kubernetes writes its times.
Knows nothing of why a phase took so long.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stoker_operator.manifests.identity import SOURCE_LABEL
from stoker_operator.observe.rollout import is_ready, is_terminating, template_hash
from stoker_operator.observe.snapshot import Observed

Object = Mapping[str, Any]


def startup(earlier: Mapping[str, Any], observed: Observed, rolled_out: str, source: str) -> dict[str, Any]:
    """status.startup: of revision `rolled_out` ("" = none is), whose model comes from `source`; else what it was."""
    if not rolled_out or earlier.get("revision") == rolled_out:
        return dict(earlier)
    ready = [
        pod
        for pod in observed.engine_pods
        if template_hash(pod) == rolled_out and is_ready(pod) and not is_terminating(pod)
    ]
    if not ready:
        return dict(earlier)
    pod = min(ready, key=lambda item: str(item["metadata"].get("creationTimestamp", "")))
    phases = {
        "scheduleSeconds": _between(pod["metadata"].get("creationTimestamp"), _since(pod, "PodScheduled")),
        "fetchSeconds": _fetch(observed, source),
        "verifySeconds": _verify(pod),
        "loadSeconds": _between(_started(pod), _since(pod, "Ready")),
    }
    return {"revision": rolled_out} | {key: value for key, value in phases.items() if value is not None}


def _between(start: object, end: object) -> int | None:
    if not start or not end:
        return None
    seconds = (datetime.fromisoformat(str(end)) - datetime.fromisoformat(str(start))).total_seconds()
    return max(int(seconds), 0)


def _since(pod: Object, kind: str) -> object:
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((item.get("lastTransitionTime") for item in conditions if item["type"] == kind), None)


def _started(pod: Object) -> object:
    for item in pod.get("status", {}).get("containerStatuses") or ():
        if item["name"] == "engine":
            return (item.get("state") or {}).get("running", {}).get("startedAt")
    return None


def _verify(pod: Object) -> int | None:
    for item in pod.get("status", {}).get("initContainerStatuses") or ():
        ended = (item.get("state") or {}).get("terminated")
        if item["name"] == "verify" and ended:
            return _between(ended.get("startedAt"), ended.get("finishedAt"))
    return None


def _fetch(observed: Observed, source: str) -> int | None:
    """Of the prefetch that succeeded, from the start of its container: what it waited for is no fetching."""
    for pod in observed.fetch_pods:
        if (pod["metadata"].get("labels") or {}).get(SOURCE_LABEL) != source:
            continue
        for item in pod.get("status", {}).get("containerStatuses") or ():
            ended = (item.get("state") or {}).get("terminated")
            if item["name"] == "fetch" and ended and not ended.get("exitCode"):
                return _between(ended.get("startedAt"), ended.get("finishedAt"))
    return None
