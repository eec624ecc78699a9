"""Whether a canary is good enough, by what its pods and the stable ones did in the same time.

Invariants: pure. Nothing is promoted without enough requests on both sides: an idle service decides nothing. Requests
that fail are judged at every look, for each of them is a client's; speed once the window is over, since few requests
say little of it.
Knows nothing of shares and steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from stoker_operator.observe.comparison import Comparison, Figures
from stoker_operator.spec.canary import Canary

BAD, GOOD, EARLY, FEW = "bad", "good", "early", "few"
# So many failures, of so many requests, are no accident.
_FAILURES, _EARLY_REQUESTS = 3, 10
# Below this nobody notices, and small models' times vary by as much.
_UNNOTICED_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """BAD, GOOD, too EARLY, or too FEW requests; `why` is a part of a sentence."""

    kind: str
    why: str = ""


def judge(found: Comparison, canary: Canary, now: datetime) -> Verdict:
    """The verdict now."""
    ours, theirs, limits = found.canary, found.stable, canary.tolerance
    enough = min(_EARLY_REQUESTS, canary.requests)
    over = now >= found.since + timedelta(seconds=canary.window)
    known = over and ours.requests >= canary.requests
    if (known or (ours.failed >= _FAILURES and ours.requests >= enough)) and _fails(ours, theirs, limits.errors):
        text = f"{ours.failed} of its {ours.requests} requests failed ({ours.failing:.1f} %)"
        return Verdict(BAD, f"{text}, of the stable revision's {theirs.failing:.1f} %")
    if not over:
        return Verdict(EARLY)
    if min(ours.requests, theirs.requests) < canary.requests:
        return Verdict(FEW)
    slower = _slower(ours, theirs, limits.first_token, limits.tokens)
    return Verdict(BAD, slower) if slower else Verdict(GOOD)


def _fails(ours: Figures, theirs: Figures, points: int) -> bool:
    return ours.failing > theirs.failing + points


def _slower(ours: Figures, theirs: Figures, first: int, tokens: int) -> str:
    """What is slower than it may be; "" = nothing. What one side has no sample of is not compared."""
    mine, stable = ours.first_token, theirs.first_token
    if mine is not None and stable is not None and mine > max(stable * (1 + first / 100), stable + _UNNOTICED_SECONDS):
        return f"its first token took {mine:.3g} s on average, the stable revision's {stable:.3g} s"
    mine, stable = ours.tokens_per_second, theirs.tokens_per_second
    if mine is not None and stable is not None and mine < stable * (1 - tokens / 100):
        return f"its streams had {mine:.3g} tokens a second, the stable revision's {stable:.3g}"
    return ""
