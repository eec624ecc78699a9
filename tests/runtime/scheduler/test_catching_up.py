"""What a draft model has to compute before it drafts: what no other sequence made it compute, and nothing twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.runtime.engine.uniform_executor import UniformExecutor

from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.pace import Pace, RowPace
from stoker_runtime.drafts.settings import DraftCosts, Drafting
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.request import Request, SamplingParams


class Always(Pace):
    """Two drafts in every step."""

    def choose(self, rows: Sequence[RowPace | None], *, changed: bool) -> tuple[int, tuple[int, ...]]:
        return 2, (2,) * len(rows)


@pytest.mark.parametrize(("length", "budget"), [(30, 64), (61, 64), (57, 9)])
def test_a_prefix_is_computed_once_for_all(length: int, budget: int) -> None:
    executor = UniformExecutor(
        num_pages=100, page_size=4, max_num_batched_tokens=budget, drafting=Drafting("draft_model", 2, 0, 0),
        draft_costs=DraftCosts(0.0, 0.0),
    )  # fmt: skip
    loop = StepLoop(executor, EngineConfig(model="uniform"))
    assert loop.scheduler.speculation is not None
    assert executor.draft_pages is not None
    loop.scheduler.speculation.pace = Always(2, executor.verify_tokens)
    prompt = tuple(range(1, length + 1))
    computed = []
    for seed in (5, 6):
        executor.prompts[seed] = prompt
        before = executor.draft_pages.caught_up
        loop.add(Request(str(seed), prompt, SamplingParams(max_tokens=20, seed=seed, ignore_eos=True)))
        while loop.has_work:
            loop.step()
        computed.append(executor.draft_pages.caught_up - before)
    # The last two tokens are run by the step that drafts, and steps pass while chunks are computed.
    assert length - 1 <= computed[0] <= length + length // budget
    assert computed[1] <= length % 4 + 4, "full pages of the prompt were computed before"
