"""The conditions that one plan gives a service: pure.

Invariants: each has a reason and a message of its own; what kstatus reads (Reconciling, Stalled) follows from Ready.
Degraded is said only of what ran already: a service that was never up is not degraded, it is on its way.
Knows nothing of how a plan is made and of times, which the status adds.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker_operator import manifests
from stoker_operator.observe.rollout import Rollout
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Condition, Finding
from stoker_operator.plan.diagnose import Trouble, first_trouble
from stoker_operator.plan.fit import Fit
from stoker_operator.plan.pods import pods_that_count
from stoker_operator.spec.service import InferenceService

# Every condition that is ours; those of other writers are left alone.
TYPES = frozenset(
    {
        "Ready", "Servable", "Degraded", "Progressing", "Reconciling", "Stalled", "ModelResolved", "ModelCached",
        "CacheVerified", "Scheduled", "Fits", "AutoscalingActive", "EndpointReady", "Monitored",
        "Understood", "ScaleToZero", "Following", "AdaptersReady", "Canary",
    }
)  # fmt: skip
# Reasons of Ready that are a stage on the way, not a failure.
STAGES = frozenset(
    {
        "Serving", "CreatingVolume", "Fetching", "RollingOut", "PodsStarting", "PodsStopping", "WaitingForIdle",
        "AwaitingAnswer", "FillingNode", "Suspended", "ScaledToZero", "RolloutPaused", "Deleting", "Asleep", "Waking",
    }
)  # fmt: skip
# Not ready by choice: nothing is being done about it and nothing is wrong.
IDLE = ("Suspended", "ScaledToZero", "RolloutPaused", "Asleep")
# Not ready although the newest revision was rolled out, or because it was given up.
_SETBACKS = ("RolledBack", "CacheCorrupt")


def serving(service: InferenceService, state: Rollout) -> str:
    """What Ready says when it is True."""
    ready = f"{state.updated_ready} of {state.desired} {state.unit}s of revision {state.current} are ready"
    return f"{ready}, and one answered a completion; clients use {manifests.public_url(service)}."


def ready_conditions(blocking: Finding | None, serving: str) -> list[Condition]:
    """Ready, and what kstatus reads: Reconciling and Stalled."""
    if blocking is None:
        return [
            Condition("Ready", "True", "Serving", serving),
            Condition("Reconciling", "False", "Settled", "Nothing is left to do."),
            Condition("Stalled", "False", "Settled", "Nothing is left to do."),
        ]
    idle = blocking.reason in IDLE
    waiting = not blocking.stalled and not idle
    return [
        Condition("Ready", "False", blocking.reason, blocking.message),
        Condition("Reconciling", str(waiting), blocking.reason, blocking.message),
        Condition("Stalled", str(blocking.stalled), blocking.reason, blocking.message),
    ]


def understood_condition(unknown: Sequence[str]) -> Condition:
    """What to say where a newer CRD has fields that nobody here knows."""
    text = f"This operator does not know {', '.join(unknown)}, and goes on without. The CRD is newer: upgrade it."
    return Condition("Understood", "False", "FieldsUnknown", text)


def fit_condition(fit: Fit) -> Condition:
    """Whether the model fits the GPU that its pods may get, and the memory that they do."""
    status = {"Fits": "True", "TooLarge": "False"}.get(fit.verdict, "Unknown")
    return Condition("Fits", status, fit.verdict, fit.message)


def pod_conditions(
    observed: Observed, blocking: Finding | None, trouble: Trouble | None, done: str, waits: str = ""
) -> list[Condition]:
    """What is to be said of the pods: Servable, Degraded, Progressing, Scheduled. `done` as in pods.py, `waits` as in
    rollout.py.
    """
    degraded = _degraded(blocking, trouble, done)
    said = servable(observed.rollout, blocking, trouble)
    return [said, degraded, _progressing(blocking, degraded, waits), _scheduled(observed)]


def servable(state: Rollout, blocking: Finding | None, trouble: Trouble | None) -> Condition:
    """Whether some pod answers, of whatever revision."""
    if state.ready:
        return Condition("Servable", "True", "PodsReady", f"{state.ready} of {state.total} {state.unit}s answer.")
    why = trouble.message if trouble else blocking.message if blocking else "No pod is ready."
    return Condition("Servable", "False", blocking.reason if blocking else "NoPods", why)


def _degraded(blocking: Finding | None, trouble: Trouble | None, done: str) -> Condition:
    if blocking is not None and (blocking.reason in _SETBACKS or (done and trouble and blocking.reason not in IDLE)):
        return Condition("Degraded", "True", blocking.reason, blocking.message)
    if done and trouble is not None and blocking is None:
        return Condition("Degraded", "True", trouble.reason, trouble.message)
    return Condition("Degraded", "False", "NoTrouble", "No pod of a revision that was rolled out has trouble.")


def _progressing(blocking: Finding | None, degraded: Condition, waits: str) -> Condition:
    """Whether the newest generation is on its way; what comes back after a trouble is no progress."""
    if blocking is None and waits:
        return Condition("Progressing", "False", "WaitingForTurn", waits)
    if blocking is None:
        return Condition("Progressing", "False", "Settled", "The newest generation is rolled out.")
    moving = not blocking.stalled and blocking.reason not in IDLE and degraded.status != "True"
    return Condition("Progressing", str(moving), blocking.reason, blocking.message)


def _scheduled(observed: Observed) -> Condition:
    pods = pods_that_count(observed)
    if not pods:
        return Condition("Scheduled", "Unknown", "NoPods", "There are no pods to schedule yet.")
    trouble = next((t for t in (first_trouble([pod]) for pod in pods) if t and t.reason == "Unschedulable"), None)
    if trouble:
        return Condition("Scheduled", "False", trouble.reason, trouble.message)
    return Condition("Scheduled", "True", "Scheduled", "Every pod has a node.")
