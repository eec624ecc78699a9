"""A pace that decides by chance, so that tests see every decision and none depends on the clock."""

from __future__ import annotations

import random
from collections.abc import Sequence

from stoker_runtime.drafts.pace import Pace, RowPace
from stoker_runtime.engine.step_loop import StepLoop


class RandomPace(Pace):
    """Any number of drafts that a step may have, and any bound for each row that may have some."""

    chance: random.Random

    def choose(self, rows: Sequence[RowPace | None], *, changed: bool) -> tuple[int, tuple[int, ...]]:
        fitting = [k for k in range(self.ladder[-1] + 1) if len(rows) * (k + 1) <= self._verify_tokens] or [0]
        k = self.chance.choice(fitting)
        return k, tuple(self.chance.randint(0, k) if row is not None else 0 for row in rows)


def decide_by_chance(loop: StepLoop, chance: random.Random) -> None:
    """Let `chance` decide about the drafts of a loop's steps."""
    speculation, executor = loop.scheduler.speculation, loop.executor
    if speculation is not None and executor.drafting is not None:
        pace = RandomPace(executor.drafting.tokens, executor.verify_tokens)
        pace.chance = chance
        speculation.pace = pace
