"""Two weeks in the life of a service, or of some that share nodes, in seconds: random histories by one clock, with what
must hold checked after every look of the operator.

STOKER_WALK_WEEKS says how many histories are walked (`make weeks`), STOKER_WALK_SEED which. A fault is printed as the
shortest history that shows it; KEPT has those that failed once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tests.operator.weeks.events import EVENTS
from tests.operator.weeks.life import Life

HISTORIES = int(os.environ.get("STOKER_WALK_WEEKS") or "3")
SEED = os.environ.get("STOKER_WALK_SEED") or ""
STEPS = 40
MINUTE, HOUR = 60, 3600
GAPS = (0, 1, 15, 45, 2 * MINUTE, 10 * MINUTE, 40 * MINUTE, 3 * HOUR, 9 * HOUR, 30 * HOUR)
Step = tuple[str, int, int] | tuple[str, int, int, int]
KEPT: dict[str, list[Step]] = {
    "every event once": [(name, 1, 10 * MINUTE) for name in EVENTS],
    "every event once, to one of three": [
        (name, 1, 10 * MINUTE, number % 3) for number, name in enumerate(EVENTS)
    ],
    # Two GPUs are given up a second apart; the scheduler comes to the pod that waits for both a second after that.
    "a GPU that another's pod waits for": [
        ("no_autoscaler", 2, MINUTE, 0),
        ("no_autoscaler", 2, 2 * MINUTE, 1),
        ("no_autoscaler", 1, 1, 2),
        ("no_autoscaler", 0, 8, 2),
        ("another_revision", 1, 2 * MINUTE, 0),
    ],
    "one GPU to spare, and all surge at once": [("all_get_another_revision", 1, 10 * MINUTE, 2)],
    "a canary in the place of another": [
        ("a_canary", 0, 2 * MINUTE),
        ("a_canary", 1, 2 * MINUTE),
        ("no_canary", 0, 0),
    ],
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

    @initialize(services=st.integers(1, 3))
    def begins(self, services: int) -> None:
        self.life = Life(services)
        self._do(self.life.begin())

    def _do(self, act: Coroutine[Any, Any, None]) -> None:
        try:
            self.loop.run_until_complete(act)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.life.world.said[-30:]])) from None

    @rule(what=st.sampled_from(sorted(EVENTS)), n=st.integers(0, 11), gap=st.sampled_from(GAPS), who=st.integers(0, 2))
    def befalls(self, what: str, n: int, gap: int, who: int) -> None:
        self._do(self.life.step(what, n, gap, who))

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
async def test_what_failed_once(history: Sequence[Step]) -> None:
    life = Life(1 + max(each[3] if len(each) == 4 else 0 for each in history))
    await life.begin()
    for each in history:
        await life.step(*each)
    await life.end()
    assert life.world.spared, "the operator looked again after every write"
