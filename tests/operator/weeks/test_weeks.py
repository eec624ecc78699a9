"""Two weeks in the life of a service, in a second: random histories by one clock, with what must hold checked after
every look of the operator.

STOKER_WALK_WEEKS says how many histories are walked (`make weeks`), STOKER_WALK_SEED which. A fault is printed as the
shortest history that shows it; KEPT has those that failed once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from tests.operator.weeks.events import EVENTS
from tests.operator.weeks.life import Life

HISTORIES = int(os.environ.get("STOKER_WALK_WEEKS") or "3")
SEED = os.environ.get("STOKER_WALK_SEED") or ""
STEPS = 40
MINUTE, HOUR = 60, 3600
GAPS = (0, 1, 15, 45, 2 * MINUTE, 10 * MINUTE, 40 * MINUTE, 3 * HOUR, 9 * HOUR, 30 * HOUR)
Step = tuple[str, int, int]
KEPT: dict[str, list[Step]] = {
    "every event once": [(name, 1, 10 * MINUTE) for name in EVENTS],
    "a sleeper that is never to wake": [
        ("a_wish", 3, 3 * HOUR),
        ("another_model", 1, 9 * HOUR),
        ("another_scaler", 8, 45),
    ],
    # Its pod that failed names the volume of before, and goes with the ReplicaSet, though no pod is asked for.
    "another model, promoted of a canary while no pod may run": [
        ("nodes_come_back", 0, 3 * HOUR),
        ("a_gpu_breaks", 4, 0),
        ("suspend", 4, 0),
        ("a_canary", 3, 0),
        ("the_canary_is_moved_into_the_spec", 8, 0),
        ("another_scaler", 4, 0),
    ],
}


class Weeks(RuleBasedStateMachine):
    """One history: an event, then some time, over and over; the rest of the two weeks passes in peace."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.life = Life()
        self._do(self.life.begin())

    def _do(self, act: Coroutine[Any, Any, None]) -> None:
        try:
            self.loop.run_until_complete(act)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.life.world.said[-30:]])) from None

    @rule(what=st.sampled_from(sorted(EVENTS)), n=st.integers(0, 11), gap=st.sampled_from(GAPS))
    def befalls(self, what: str, n: int, gap: int) -> None:
        self._do(self.life.step(what, n, gap))

    def teardown(self) -> None:
        try:
            self._do(self.life.end())
        finally:
            self.loop.close()


@pytest.mark.timeout(300 + 60 * HISTORIES)  # on a machine that does much else
def test_two_weeks_of_whatever_befalls_a_service() -> None:
    chosen = settings(
        max_examples=HISTORIES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=not SEED,
        suppress_health_check=list(HealthCheck),
    )
    if SEED:
        seed(int(SEED))(Weeks)
    run_state_machine_as_test(Weeks, settings=chosen)


@pytest.mark.parametrize("history", KEPT.values(), ids=KEPT)
async def test_what_failed_once(history: Iterable[Step]) -> None:
    life = Life()
    await life.begin()
    for what, n, gap in history:
        await life.step(what, n, gap)
    await life.end()
    assert life.world.spared, "the operator looked again after every write"
