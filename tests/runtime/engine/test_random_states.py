"""Random schedules where layers keep a state: each batch goes on exactly where its slots' states stand."""

from __future__ import annotations

import pytest
from tests.runtime.engine.test_random_schedules import Scenario

from stoker_runtime.request import EngineStats, FinishReason

SCHEDULES = 200


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_random_schedules_with_states(policy: str, drafted: bool, swap: bool) -> None:
    total, skipped, saved, shared, out, back = EngineStats(), 0, 0, 0, 0, 0
    for seed in range(SCHEDULES):
        scenario = Scenario(seed, policy, swap=swap, states=True, drafts=1 + seed % 5 if drafted else 0)
        try:
            scenario.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {policy}/{seed}, drafts {drafted}, swap {swap}: {error}") from error
        stats, states, placement = scenario.loop.stats(), scenario.executor.states, scenario.loop.scheduler._placement
        assert states is not None
        for name in ("preemptions", "prefix_hits", "host_hits", "draft_tokens", "accepted_tokens"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        skipped, out, back = skipped + states.skipped, out + states.out, back + states.back
        if placement.states is not None:
            saved += placement.states.snapshots.used
            shared += bool(stats.prefix_hits)
            # Each token that counts as a hit was not run, unless its step failed.
            failed = any(each.finish is FinishReason.ERROR for each in scenario.received.values())
            assert failed or stats.prefix_hits <= states.skipped
        assert stats.running == stats.waiting == stats.pages_used == stats.swapped == stats.host_pages_used == 0
    assert total.preemptions > 50, "the worlds are too roomy to test preemption"
    assert total.prefix_hits > 100, "the worlds share too little to test the prefix cache"
    assert shared > 20
    assert saved > 50
    assert skipped >= total.prefix_hits
    assert (total.accepted_tokens > 50) == drafted
    assert (out > back > 40) == swap, "too little goes to the host and back"
    assert (total.host_hits > 50) == swap, "too few cached states come back from the host"
