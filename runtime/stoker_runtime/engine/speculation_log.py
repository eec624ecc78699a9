"""Says in the log, now and then while drafts are verified, what they bring.

Invariants: nothing is logged where nothing is drafted; two lines are at least `EVERY_SECONDS` apart.
Knows nothing of where the figures come from.
"""

from __future__ import annotations

import logging

from stoker_runtime.request import EngineStats

EVERY_SECONDS = 10.0

log = logging.getLogger(__name__)


class SpeculationLog:
    """What has been told of drafts."""

    def __init__(self) -> None:
        self._told = EngineStats()
        self._at = 0.0

    def tell(self, stats: EngineStats, now: float) -> None:
        """Log what came since the last line, if there is something and it is time; `now` in seconds of a clock."""
        before = self._told
        if stats.drafts == before.drafts or now - self._at < EVERY_SECONDS:
            return
        drafts, offered = stats.drafts - before.drafts, stats.draft_tokens - before.draft_tokens
        accepted = stats.accepted_tokens - before.accepted_tokens
        log.info(
            "drafts: %d of %d tokens accepted (%.0f%%), %.2f tokens a verified sequence and step, "
            "at the cost of %.0f tokens; %d tokens in all",
            accepted, offered, 100 * accepted / max(offered, 1), 1 + accepted / drafts,
            stats.draft_cost_tokens - before.draft_cost_tokens, stats.generation_tokens - before.generation_tokens,
        )  # fmt: skip
        self._told, self._at = stats, now
