"""Ranks that hang are told from ranks that work, by figures alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import LAST_WORDS_SECONDS as LAST_OF_THE_ENGINE
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.split import split_spec
from stoker_runtime.ranks.crew import GPU_WORDS_SECONDS, LAST_WORDS_SECONDS
from stoker_runtime.ranks.longest_step import longest_step
from stoker_runtime.ranks.watch import STILL_SECONDS, STOPPED_SECONDS, WAIT_SECONDS, Life, Watch

TICK = 0.25


def reason_of(
    watch: Watch, lives: Callable[[int], list[Life]], calls: Callable[[int], int], ticks: int = 100, step: float = TICK
) -> tuple[str | None, float]:
    """The first reason, and the seconds until it came."""
    for tick in range(ticks):
        reason = watch.tick(tick * step, lives(tick), calls(tick))
        if reason is not None:
            return reason, tick * step
    return None, ticks * step


def computing(tick: int) -> list[Life]:
    return [Life(False, 0.01 * tick), Life(False, 0.02 * tick)]


def resting(tick: int) -> list[Life]:
    return [Life(False, 5.0), Life(False, 7.0)]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_stopped_rank_is_found_within_three_seconds(on_gpu: bool) -> None:
    watch = Watch(TICK, on_gpu=on_gpu)
    reason, seconds = reason_of(watch, lambda tick: [Life(False, tick), Life(tick > 4, 1.0)], lambda tick: 2 * tick)
    assert reason == f"rank 1 has been stopped for {STOPPED_SECONDS:.0f} s"
    assert seconds - 4 * TICK <= STOPPED_SECONDS + 3 * TICK


def test_a_rank_that_goes_on_is_not() -> None:
    watch = Watch(TICK, on_gpu=False)
    often = lambda tick: [Life(False, tick), Life(tick % 8 < 7, tick)]  # noqa: E731
    assert reason_of(watch, often, lambda tick: 2 * tick)[0] is None


def test_a_long_step_of_a_cpu_may_take_as_long_as_somebody_computes() -> None:
    assert reason_of(Watch(TICK, on_gpu=False), computing, lambda tick: 1)[0] is None


def test_an_exchange_that_never_answers() -> None:
    reason, seconds = reason_of(Watch(TICK, on_gpu=False), resting, lambda tick: 1)
    assert reason is not None
    assert "no rank has computed" in reason
    assert seconds <= STILL_SECONDS + 4 * TICK


def test_a_gpu_that_never_answers_though_hosts_spin() -> None:
    reason, seconds = reason_of(Watch(TICK, on_gpu=True), computing, lambda tick: 3)
    assert reason is not None
    assert "a step has not ended" in reason
    assert seconds <= WAIT_SECONDS + 4 * TICK


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("phase", [0.01, 0.99])
def test_streams_end_within_five_seconds_of_an_exchange_that_never_answers(on_gpu: bool, phase: float) -> None:
    """Wherever between two ticks it begins, and though the leader, who waits in it, has no words left."""
    begun = 20 + phase
    _, seconds = reason_of(
        Watch(TICK, on_gpu=on_gpu),
        lambda tick: [Life(False, min(tick, begun))] * 2,
        lambda tick: 2 * tick if tick < begun else 999,
    )
    words = GPU_WORDS_SECONDS if on_gpu else LAST_WORDS_SECONDS
    assert seconds - begun * TICK + words + LAST_OF_THE_ENGINE < 4.75


def test_a_step_of_a_gpu_may_take_more_than_two_seconds() -> None:
    """The longest are prompts of as many tokens as a step has room for: one second."""
    long = round(2.75 / TICK)
    reason, _ = reason_of(Watch(TICK, on_gpu=True), computing, lambda tick: 1 + 2 * (tick // long))
    assert reason is None


def test_a_step_of_a_gpu_may_take_as_long_as_the_longest_one_does() -> None:
    def waiting(seconds: float) -> tuple[str | None, float]:
        lasting = round(seconds / TICK)
        watch = Watch(TICK, on_gpu=True, longest_step=6.5)
        return reason_of(watch, computing, lambda tick: 1 + 2 * (tick // lasting))

    assert waiting(6.25)[0] is None
    reason, seconds = waiting(60)
    assert reason is not None
    assert 6.5 < seconds <= 6.5 + 4 * TICK


def test_how_long_the_longest_step_may_take() -> None:
    """Of 70B on two GPUs a chunk at the end of 131,072 tokens takes longer than the wait that is usual; 7B does not."""
    seconds = {}
    for shape, length in (("llama-3.3-70b", 131_072), ("llama-3.3-70b", 4096), ("qwen2.5-7b", 32_768)):
        spec = build_spec(read_source(f"shape:{shape}"))
        for stages in (1, 2):
            config = EngineConfig(shape, max_model_len=length, max_num_batched_tokens=8192, max_num_seqs=256,
                                  tensor_parallel_size=2, pipeline_parallel_size=stages)  # fmt: skip
            place = places(2, stages)[0]
            seconds[shape, length, stages] = longest_step(split_spec(spec, place), config)
    # By hand: 2 · 35e9 · 8,448 + 4 · 8,448 · 131,072 · 4,096 · 80 operations at 250e12 a second.
    assert seconds["llama-3.3-70b", 131_072, 1] == pytest.approx(8.17, rel=0.02)
    assert seconds["llama-3.3-70b", 4096, 1] < WAIT_SECONDS
    assert seconds["qwen2.5-7b", 32_768, 1] < WAIT_SECONDS
    # Half of the layers, twice.
    assert seconds["llama-3.3-70b", 131_072, 2] == pytest.approx(seconds["llama-3.3-70b", 131_072, 1], rel=0.1)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_idle_ranks_and_ranks_that_step_are_well(on_gpu: bool) -> None:
    assert reason_of(Watch(TICK, on_gpu=on_gpu), resting, lambda tick: 4)[0] is None
    assert reason_of(Watch(TICK, on_gpu=on_gpu), resting, lambda tick: 2 * tick + 1)[0] is None


def test_a_stall_of_the_watcher_is_nobodys_hang() -> None:
    watch = Watch(TICK, on_gpu=False)
    assert reason_of(watch, resting, lambda tick: 1, ticks=5, step=1000.0)[0] is None
