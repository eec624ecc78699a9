"""Random schedules where layers with a window give up pages: each batch verified, and how many pages are held."""

from __future__ import annotations

import pytest
from tests.runtime.engine.test_random_schedules import Scenario

from stoker_runtime.request import EngineStats

SCHEDULES = 150


class NearScenario(Scenario):
    """Who decodes holds no more than its window takes, whatever its length."""

    def step(self) -> None:
        """One step, and the bound."""
        super().step()
        scheduler, sight = self.loop.scheduler, self.executor.sight
        assert sight is not None
        for sequence in scheduler._decoding:
            if sequence.slot >= 0 and sequence not in scheduler._launched_prefills:
                assert len(sequence.near) <= sight.span, "more places than the window takes"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
@pytest.mark.parametrize("block", range(2))
def test_random_schedules_with_pages_given_up(policy: str, block: int) -> None:
    total, given_up, served = EngineStats(), 0, 0
    for seed in range(block * SCHEDULES, (block + 1) * SCHEDULES):
        scenario = NearScenario(seed, policy, near=True)
        try:
            scenario.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {policy}/{seed}: {error}") from error
        stats = scenario.loop.stats()
        assert scenario.executor.near is not None
        given_up += scenario.executor.near.given_up
        served += len(scenario.received)
        for name in ("preemptions", "prefix_hits"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        assert stats.running == stats.waiting == stats.pages_used == 0
    assert total.preemptions > 25, "the worlds are too roomy to test preemption"
    assert total.prefix_hits > 50, "the worlds share too little to test the prefix cache"
    assert given_up > 1000, "too little is given up"
    assert served > 500, "too much is refused"
