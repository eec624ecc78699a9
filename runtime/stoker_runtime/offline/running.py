"""Runs the step loop in the caller's thread until what was asked for has ended.

Invariants: the loop is idle afterwards, also when a step or the caller's `take` raises.
Knows nothing of prompts, texts or records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.sequence import Sequence


def run_to_end(loop: StepLoop, running: Iterable[Sequence], take: Callable[[StepOutput], None]) -> None:
    """Step until nothing is left, and show `take` every output. Raises what the engine or `take` raises."""
    try:
        while loop.has_work:
            take(step(loop))
    finally:
        clear(loop, running)


def step(loop: StepLoop) -> StepOutput:
    """One step; one that is cut short, by Ctrl-C too, leaves nothing that could be continued."""
    try:
        return loop.step()
    except BaseException as error:
        loop.fail(error)
        raise


def clear(loop: StepLoop, running: Iterable[Sequence]) -> None:
    """End what has not ended, and take in the step that is still in flight."""
    for sequence in running:
        loop.abort(sequence)
    while loop.has_work:
        loop.step()
