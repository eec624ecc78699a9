"""`kubectl stoker status`: one service on one screen: what it waits for, since when, what to do, and what is there.

Invariants: pure; says nothing that the object, its pods and its events do not say.
Knows nothing of where those come from.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from stoker_operator.manifests.identity import COMPONENT
from stoker_operator.observe.rollout import is_finished, is_ready, is_terminating, template_hash
from stoker_operator.plugin.advice import advice
from stoker_operator.plugin.place import event_time, ready_of
from stoker_operator.spec.quantity import human_bytes

Object = Mapping[str, Any]
WIDTH = 118
_LABEL = 11
_EVENTS = 6
# The way to an answer: condition → the word for it.
_STEPS = (
    ("ModelResolved", "resolved"), ("ModelCached", "cached"), ("Fits", "fits"), ("Scheduled", "scheduled"),
    ("Servable", "servable"), ("Ready", "ready"),
)  # fmt: skip
_REVISIONS = ("current", "previous", "failed")
_ALARMS = (("Degraded", "True"), ("Understood", "False"))
_MARKS = {"True": "+", "False": "-", "Unknown": "?"}


def screen(
    service: Object, pods: Sequence[Object], events: Sequence[Object], now: datetime, url: str = ""
) -> Iterator[str]:
    """The lines. `events` are the service's, oldest first; `url` goes before that of the status."""
    meta, status = service["metadata"], service.get("status") or {}
    ready, name = ready_of(service), str(meta["name"])
    behind = int(status.get("observedGeneration", 0)) < int(meta.get("generation", 1))
    yield f"{meta['namespace']}/{name}  {_word(ready)}" + ("  (a newer spec was not looked at yet)" if behind else "")
    yield ""
    yield from _row("", ready["message"] or "The operator has not said anything of it yet.")
    yield from _row("since", _since(ready, events, meta, now))
    yield from _row("to do", advice(str(ready["reason"]), name))
    yield ""
    yield from _row("steps", "  ".join(_steps(status)))
    yield from _facts(service, url)
    yield ""
    yield from _pods(service, pods, now)
    yield from _events(events, now)


def overview(services: Sequence[Object], now: datetime) -> Iterator[str]:
    """One line a service, and what to do about those that are not ready."""
    rows = [("NAME", "READY", "REASON", "PODS", "AGE", "TO DO")]
    for service in services:
        meta, status, ready = service["metadata"], service.get("status") or {}, ready_of(service)
        pods = f"{status.get('readyReplicas', 0)}/{status.get('replicas', 0)}"
        todo = "" if ready["status"] == "True" else advice(str(ready["reason"]), str(meta["name"]))
        rows.append((meta["name"], ready["status"], ready["reason"], pods, _age(meta["creationTimestamp"], now), todo))
    yield from table(rows)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of words in columns, as kubectl prints them."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "   ".join(str(word).ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()


def _word(ready: Object) -> str:
    return "Ready" if ready["status"] == "True" else f"not ready: {ready['reason'] or 'not seen yet'}"


def _row(label: str, text: str) -> Iterator[str]:
    """A labelled text, wrapped."""
    lines = textwrap.wrap(text, WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False) or [""]
    yield f"{label:<{_LABEL}}{lines[0]}".rstrip()
    yield from (" " * _LABEL + line for line in lines[1:])


def _since(ready: Object, events: Sequence[Object], meta: Object, now: datetime) -> str:
    """Since when the reason holds: an event tells of every change of it; older ones may be gone."""
    changed = [event_time(event) for event in events if event.get("reason") == ready["reason"]]
    when = changed[-1] if changed and ready["reason"] else ready.get("lastTransitionTime") or meta["creationTimestamp"]
    return f"{_age(str(when), now)} ago ({when})"


def _steps(status: Object) -> Iterator[str]:
    said = {item["type"]: item["status"] for item in status.get("conditions") or ()}
    for kind, word in _STEPS:
        if kind in said:
            yield f"[{_MARKS.get(said[kind], '?')}] {word}"


def _facts(service: Object, url: str) -> Iterator[str]:
    """What it serves, from where, and what that takes."""
    spec, status = service["spec"], service.get("status") or {}
    model, cache, fit = (status.get(key) or {} for key in ("model", "cache", "fit"))
    asked = f"{spec['model']['uri']} at {spec['model'].get('revision', 'main')}"
    found = f" = {str(model['resolvedRevision'])[:12]}, {human_bytes(model['bytes'])}" if model else ""
    yield from _row("model", asked + found)
    if cache and cache.get("progress") != "100%":
        eta = f", about {cache['etaSeconds']} s to go" if cache.get("etaSeconds") else ""
        yield from _row("cache", f"{cache.get('progress', '0%')} on volume {cache.get('claim', '')}{eta}")
    if fit:
        sums = f"{fit.get('requiredGiB')} of {fit.get('gpuGiB')} GiB on {fit.get('gpuProduct')}"
        verdict = str(fit.get("verdict"))
        yield from _row("memory", f"{verdict}: {sums}" if fit.get("requiredGiB") else verdict)
    yield from _groups(status)
    yield from _adapters(status)
    yield from _row("url", url or str(status.get("url", "")))
    kept = {key: value for key, value in (status.get("revisions") or {}).items() if key in _REVISIONS}
    if kept:
        yield from _row("revisions", ", ".join(f"{key} {value}" for key, value in kept.items()))
    yield from _row("sleep", " ".join(_sleep(status["sleep"])).rstrip(";")) if status.get("sleep") else ()
    scaling = status.get("scaling") or {}
    if scaling:
        unit = "groups" if status.get("groups") else "pods"
        yield from _row("scaling", f"{scaling.get('desired')} {unit} wanted")
    if canary := status.get("canary"):
        yield from _row("canary", _canary(canary))
    for item in status.get("conditions") or ():
        if item["type"] == "Canary":
            yield from _row("", item["message"])
        if (item["type"], item["status"]) in _ALARMS:
            yield from _row(str(item["type"]).lower(), item["message"])


def _sleep(sleep: Object) -> Iterator[str]:
    """Where it stands between awake and asleep, why, and what comes next."""
    since = f" since {sleep['since']}" if sleep.get("since") else ""
    yield f"{sleep['state']}{since}{': ' if sleep.get('why') else ''}{sleep.get('why', '')};"
    if "step" in sleep:
        eta = sleep.get("etaSeconds")
        yield f"{sleep['step']}, " + (f"about {eta} s to go;" if eta else "longer than the last time;")
    if sleep.get("until"):
        yield f"awake until {sleep['until']} at least;"
    if sleep.get("wakesAt"):
        yield f"its schedule has pods run at {sleep['wakesAt']};"


def _groups(status: Object) -> Iterator[str]:
    """The groups of pods that were made anew: how often, when and why."""
    restarted = [each for each in status.get("groups") or () if each.get("restarts")]
    for number, each in enumerate(restarted):
        why = f": {each['why']}" if each.get("why") else ""
        text = f"{each['index']} was made anew {each['restarts']} times, last at {each['restarted']}{why}"
        yield from _row("" if number else "groups", text)


def _adapters(status: Object) -> Iterator[str]:
    """A line an adapter: what it is, who serves it, and what is wrong with it."""
    for index, each in enumerate(status.get("adapters") or ()):
        at = f" at {str(each['revision'])[:12]}" if each.get("revision") else ""
        why = "" if each.get("state") == "Loaded" else f". {each.get('message', '')}"
        text = f"{each['name']}{at}: {each.get('state')}, in {each.get('pods', 0)} pods{why}"
        yield from _row("adapters" if not index else "", text)


def _canary(canary: Object) -> str:
    """Where it stands, and since when."""
    at = f", step {canary['step']} of {canary['steps']}" if canary.get("steps", 1) > 1 else ""
    pods = f", {canary['readyReplicas']}/{canary['replicas']} pods ready" if canary.get("replicas") else ""
    return f"{canary['state']}{at} since {canary['since']}{pods}"


def _pods(service: Object, pods: Sequence[Object], now: datetime) -> Iterator[str]:
    rows = [("POD", "STATE", "RESTARTS", "REVISION", "NODE", "AGE")]
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
        if is_finished(pod) and _part(pod) == "fetch":
            continue
        rows.append(
            (
                pod["metadata"]["name"],
                _state(pod),
                str(sum(int(each.get("restartCount", 0)) for each in _statuses(pod))),
                template_hash(pod) or _part(pod),
                str(pod["spec"].get("nodeName", "")) or "-",
                _age(pod["metadata"]["creationTimestamp"], now),
            )
        )
    yield from table(rows) if len(rows) > 1 else ("no pods",)
    status = service.get("status") or {}
    if status.get("terminatingReplicas"):
        yield f"{status['terminatingReplicas']} of them still hold their GPUs until their requests are finished"


def _part(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(COMPONENT, ""))


def _statuses(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _state(pod: Object) -> str:
    """What a pod does, in one word: that of the first container that does not run."""
    if is_terminating(pod):
        return "Terminating"
    if is_ready(pod):
        return "Ready"
    for each in _statuses(pod):
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] != "PodInitializing":
            return str(waiting["reason"])
    running = [str(each["name"]) for each in _statuses(pod) if "running" in (each.get("state") or {})]
    return f"runs {running[0]}" if running else str((pod.get("status") or {}).get("phase", "Pending"))


def _events(events: Sequence[Object], now: datetime) -> Iterator[str]:
    if events:
        yield ""
        yield "LAST EVENTS"
    for event in events[-_EVENTS:]:
        text = f"{_age(event_time(event), now):>6} ago  {event['reason']}: {' '.join(str(event['message']).split())}"
        yield text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def _age(stamp: object, now: datetime) -> str:
    """How long ago, in its largest two units: "3m20s", "5d2h"."""
    try:
        then = datetime.fromisoformat(str(stamp))
    except ValueError:
        return "?"
    left = max(0, int((now - then.astimezone(UTC)).total_seconds()))
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= size or unit == "s":
            parts.append(f"{left // size}{unit}")
        left %= size
    return "".join([part for part in parts if part != "0s" or len(parts) == 1][:2])
