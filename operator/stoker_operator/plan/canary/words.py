"""What is said of a canary: the condition, and the figures of the status.

Invariants: pure; what does not change does not change a word, so nothing is written over and over.
Knows nothing of how a canary goes on.
"""

from __future__ import annotations

from datetime import timedelta

from stoker_operator.manifests.canary import (
    ABORTED,
    FAILED,
    IN_SPEC,
    PASSED,
    PROMOTED,
    PROMOTING,
    RETURNING,
    RUNNING,
    canary_name,
)
from stoker_operator.observe.comparison import Comparison, Figures
from stoker_operator.plan.actions import Condition
from stoker_operator.plan.wording import counted, sentence
from stoker_operator.spec.canary import Canary
from stoker_operator.spec.service import InferenceService

_AGAIN = "To try the same again, take spec.canary out and put it in again"


def condition(service: InferenceService, state: str, why: str, text: str, *, few: bool = False) -> Condition:
    """The condition Canary: True of one that is good, False of one that was given up, Unknown until that is known.

    `why` explains the state, `text` is what is to be said while it is under way.
    """
    name = service.name
    if state == FAILED:
        text = f"The canary was taken back: {why}. The stable revision has all requests. Change spec.canary. {_AGAIN}"
        return _said("False", "CanaryFailed", text)
    if state == ABORTED:
        return _said("False", "CanaryAborted", f"The canary was taken back: {why}. {_AGAIN}")
    if state == RETURNING:
        return _said("False", "CanaryReturning", f"All pods go back to what spec says: {why}")
    if state == PROMOTING:
        return _said("True", "CanaryPromoting", f"All pods become what the canary is: {why}")
    if state == PROMOTED:
        text = (
            "All pods are what the canary was, and stay so while spec.canary is there. Move it into the spec, in git "
            f"or by: kubectl stoker promote {name} --spec. No pod changes by that"
        )
        return _said("True", "CanaryPromoted", text)
    if state == IN_SPEC:
        return _said("True", "CanaryInSpec", "The spec asks for what spec.canary asks for. Take spec.canary out")
    if state == PASSED:
        more = f"To go on: kubectl stoker promote {name}, or kubectl stoker abort {name}"
        return _said("True", "CanaryPassed", f"The canary is as good as the stable revision. {text} {more}")
    if state == RUNNING:
        return _said("Unknown", "CanaryNeedsRequests" if few else "CanaryRunning", text)
    return _said("Unknown", "CanaryStarting", text)


def waiting(text: str) -> Condition:
    """The condition while it cannot begin."""
    return _said("Unknown", "CanaryWaiting", text)


def share_text(service: InferenceService, weight: int, share: int, pods: tuple[int, int], *, routed: bool) -> str:
    """How much it is asked, and how much it gets. `pods`: the canary's that are ready, and the stable ones'."""
    if routed:
        return f"HTTPRoute {service.name} gives {share} % of the requests to it."
    mine, others = pods
    text = f"{counted(mine, 'pod')} beside {others} stable {'one' if others == 1 else 'ones'} have {share} %"
    if share == weight:
        return f"{text} of the connections."
    more = "endpoint.httpRoute would let it be exact" if share > weight else "it has no more pods than the stable one"
    return f"{text} of the connections, where {weight} % are asked for: {more}."


def compared(found: Comparison, canary: Canary, *, few: bool) -> str:
    """What the figures are, and until when they are awaited."""
    until = found.since + timedelta(seconds=canary.window)
    text = f"Canary: {_figures(found.canary)}; stable: {_figures(found.stable)}."
    if few:
        return f"{text} A verdict takes {counted(canary.requests, 'request')} of each."
    return f"{text} Compared until {until:%H:%M:%S} UTC."


def _figures(found: Figures) -> str:
    parts = [counted(found.requests, "request")]
    parts += [f"{found.failed} failed"] if found.failed else []
    parts += [f"first token after {found.first_token:.3g} s"] if found.first_token is not None else []
    parts += [f"{found.tokens_per_second:.3g} tokens/s"] if found.tokens_per_second is not None else []
    return ", ".join(parts)


def figures_status(found: Figures) -> dict[str, object]:
    """The figures as the status has them."""
    status: dict[str, object] = {"requests": found.requests, "failed": found.failed}
    if found.first_token is not None:
        status["firstTokenSeconds"] = round(found.first_token, 4)
    if found.tokens_per_second is not None:
        status["tokensPerSecond"] = round(found.tokens_per_second, 2)
    return status


def gone(service: InferenceService, why: str) -> str:
    """Why its pods go."""
    return f"{canary_name(service)} is not wanted any more: {why}"


def _said(status: str, reason: str, text: str) -> Condition:
    return Condition("Canary", status, reason, sentence(text))
