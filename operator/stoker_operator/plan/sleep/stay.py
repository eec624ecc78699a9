"""Why pods run though nobody asks: people wished it, or the schedule has them run.

Invariants: pure. A wish to sleep goes before the schedule's span of that moment, and before no later one.
Knows nothing of the steps to sleep and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from stoker_operator.manifests.activation import ASLEEP, Sleep
from stoker_operator.plan.sleep.hours import Span, next_change, span_at
from stoker_operator.plan.sleep.wish import Wish
from stoker_operator.spec.service import InferenceService
from stoker_operator.spec.sleeping import ScaleToZero


@dataclass(frozen=True, slots=True)
class Stay:
    """At least `least` pods run until `until`; `why` in words."""

    why: str
    until: datetime
    least: int = 1


def heed(before: Sleep, wish: Wish | None, wanted: ScaleToZero, now: datetime) -> Sleep:
    """The note with what is over forgotten, and with what the wish changes at once."""
    over = stamp(now)
    kept = replace(
        before,
        until=before.until if before.until > over else "",
        skips=before.skips if before.skips > over else "",
    )
    if wish is None:
        return kept
    if wish.wakes:
        lasts = timedelta(seconds=wanted.idle_after if wish.seconds is None else wish.seconds)
        return replace(kept, wish=wish.text, until=stamp(now + lasts), skips="")
    kept = overrule(kept, wanted, now)
    return replace(kept, wish=wish.text) if before.state == ASLEEP else kept


def overrule(sleep: Sleep, wanted: ScaleToZero, now: datetime) -> Sleep:
    """The note when people put the service to sleep by hand: neither a wish nor this span keeps it awake."""
    span = span_at(wanted.schedule, now)
    return replace(sleep, until="", skips=stamp(span.until) if span is not None else sleep.skips)


def stay_of(sleep: Sleep, wanted: ScaleToZero, now: datetime) -> Stay | None:
    """Why pods are to run now; None, only requests are a reason."""
    span = None if sleep.skips else span_at(wanted.schedule, now)
    wished = datetime.fromisoformat(sleep.until) if sleep.until else None
    if wished is not None and (span is None or wished > span.until):
        return Stay(f"it was wished: {sleep.wish}", wished, span.least if span is not None else 1)
    return Stay(_scheduled(span), span.until, span.least) if span is not None else None


def _scheduled(span: Span) -> str:
    pods = "" if span.least == 1 else f"{span.least} "
    return f"its schedule has {pods}pods run until {span.said}"


def changes_at(sleep: Sleep, wanted: ScaleToZero, now: datetime) -> datetime | None:
    """When time alone changes what keeps it awake."""
    noted = [datetime.fromisoformat(each) for each in (sleep.until, sleep.skips) if each]
    soon = next_change(wanted.schedule, now)
    return min([*noted, *([soon] if soon is not None else [])], default=None)


def staffed(service: InferenceService, stay: Stay | None) -> InferenceService:
    """The service with as many pods at least as the hour wants."""
    scaling = service.autoscaling
    if stay is None or scaling is None:
        return service
    return replace(service, autoscaling=replace(scaling, least=max(scaling.least, stay.least)))


def stamp(now: datetime) -> str:
    """A moment as Kubernetes writes it; two of them compare as the moments do."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
