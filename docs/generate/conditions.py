"""Conditions and their reasons.

Invariants: every reason that the operator's source gives is listed; see reasons.py.
Knows nothing of what to do about one; see the operations guide.
"""

from __future__ import annotations

from docs.generate import reasons
from docs.generate.markdown import code, heading, table

from stoker_operator.plan.conditions import STAGES, TYPES
from stoker_runtime.fetch.errors import FetchError

INTRODUCTION = """
Every condition has a reason, one word, and a message, a sentence that says what to do. What to do for each reason of
`Ready` is in [Operate](../operate.md#troubleshooting). Where a pod, an autoscaler or a Gateway has a reason of its own,
that one is shown as it is.
"""
FETCH = """
## What `stoker fetch` reports

The prefetch Job's own reasons; they become `Ready`'s, but for `NotPublished`, after which the operator repairs the
cache. With exit status 3 a retry cannot help before somebody changes something; it is made nevertheless, ever more
seldom.
"""


def page() -> str:
    """docs/reference/conditions.md."""
    every = reasons.found()
    ready = sorted({each.reason for each in every if each.condition == reasons.READY})
    rows = [
        (code(reason), "a stage" if reason in STAGES else "", _modules(every, reasons.READY, reason))
        for reason in ready
        if reason not in {each.__name__ for each in FetchError.__subclasses__()}
    ]
    others = [
        (code(condition), code(reason), _modules(every, condition, reason))
        for condition in sorted(TYPES - {reasons.READY})
        for reason in sorted({each.reason for each in every if each.condition == condition})
    ]
    fetch = [
        (code(each.__name__), str(each.exit_status), (each.__doc__ or "").strip())
        for each in sorted(FetchError.__subclasses__(), key=lambda each: each.__name__)
    ]
    return "".join(
        (
            heading("Conditions and reasons", INTRODUCTION),
            "\n## Ready\n" + table(("reason", "on the way", "decided in"), rows),
            FETCH + table(("reason", "exit status", "when"), fetch),
            "\n## Other conditions\n\nBesides those listed here, a condition may take over the reason of `Ready`.\n",
            table(("condition", "reason", "decided in"), others),
        )
    )


def _modules(every: list[reasons.Reason], condition: str, reason: str) -> str:
    return ", ".join(code(each.module) for each in every if (each.condition, each.reason) == (condition, reason))
