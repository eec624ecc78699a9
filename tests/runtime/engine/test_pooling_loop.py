"""The loop of a model that pools: batches, order, aborts, failures, and what is done to a vector."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.core import describe_ready, make_loop, open_events
from stoker_runtime.engine.pooling_loop import PoolingLoop, finish_vector
from stoker_runtime.errors import CapacityError, ConfigError, EngineError, RequestError
from stoker_runtime.kv_events_settings import KvEventsConfig
from stoker_runtime.models.pooling import Pooling, PoolingSpec, Task
from stoker_runtime.request import FinishReason, PoolingParams, Request, SamplingParams
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.pool_batch import PoolBatch

EMBED = PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=False)


class CountingLaunched:
    """A launched batch; the vector of a text is (sum of its ids, its length, where its second text begins)."""

    def __init__(self, executor: CountingExecutor, batch: PoolBatch) -> None:
        self._executor = executor
        self._batch = batch

    def result(self) -> NDArray[np.float32]:
        self._executor.in_flight -= 1
        if self._batch.step in self._executor.breaks:
            raise self._executor.error
        rows = [(sum(row.token_ids), len(row.token_ids), row.second_segment) for row in self._batch.rows]
        return np.array(rows, dtype=np.float32)


class CountingExecutor:
    """An executor without a model that checks what it is given."""

    num_pages = page_size = 0
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, max_num_seqs: int = 4, max_num_batched_tokens: int = 16) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = 10
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = 100
        self.size = 3
        self.pooling = EMBED
        self.batches: list[PoolBatch] = []
        self.in_flight = 0
        self.breaks: set[int] = set()
        self.refuses: set[int] = set()
        self.error: Exception = EngineError("the step went wrong")

    def pool(self, batch: PoolBatch) -> CountingLaunched:
        assert batch.rows
        assert len(batch.rows) <= self.max_num_seqs
        assert batch.num_tokens <= self.max_num_batched_tokens
        assert self.in_flight <= 1, "more than one step ahead"
        self.batches.append(batch)
        if batch.step in self.refuses:
            raise self.error
        self.in_flight += 1
        return CountingLaunched(self, batch)

    def idle(self) -> bool:
        return False

    def describe(self) -> dict[str, str]:
        return {"device": "none"}

    def close(self) -> None:
        """Nothing to free."""


def text(name: str, *ids: int, priority: int = 0, **pooling: int) -> Request:
    return Request(
        name, ids or (1, 2, 3), SamplingParams(max_tokens=0), priority=priority, pooling=PoolingParams(**pooling)
    )


def make(executor: CountingExecutor | None = None, **options: object) -> tuple[PoolingLoop, CountingExecutor]:
    executor = executor or CountingExecutor()
    return PoolingLoop(executor, replace(EngineConfig("m"), **options)), executor


def drain(loop: PoolingLoop) -> Iterator[tuple[Sequence, NDArray[np.float32]]]:
    while loop.has_work:
        output = loop.step()
        assert len(output.vectors) == len(output.finished)
        for sequence, vector in output.vectors:
            yield sequence, np.frombuffer(vector, dtype=np.float32)


def test_texts_share_steps_within_rows_and_tokens() -> None:
    loop, executor = make()
    asked = [loop.add(text(f"t{length}-{at}", *range(length)), handle=at) for at, length in enumerate((10, 6, 1, 9, 8))]
    found = {sequence.request.id: vector.tolist() for sequence, vector in drain(loop)}
    assert [[len(row.token_ids) for row in batch.rows] for batch in executor.batches] == [[10, 6], [1, 9], [8]]
    assert found == {each.request.id: [sum(each.tokens), len(each.tokens), 0.0] for each in asked}
    assert [each.finish for each in asked] == [FinishReason.STOP] * 5
    stats = loop.stats()
    assert (stats.steps, stats.running, stats.waiting, stats.prompt_tokens) == (3, 0, 0, 34)


def test_one_step_ahead() -> None:
    loop, executor = make()
    for at in range(6):
        loop.add(text(str(at)))
    assert not loop.step().finished
    assert loop.stats().running == 4
    assert len(loop.step().finished) == 4
    assert len(executor.batches) == 2
    assert len(loop.step().finished) == 2
    assert not loop.has_work


def test_priorities() -> None:
    loop, _ = make(CountingExecutor(max_num_seqs=1), scheduling_policy="priority")
    loop.add(text("late", priority=2))
    loop.add(text("first", priority=-1))
    loop.add(text("middle", priority=0))
    assert [sequence.request.id for sequence, _ in drain(loop)] == ["first", "middle", "late"]


def test_an_aborted_text_gives_nothing() -> None:
    loop, executor = make(CountingExecutor(max_num_seqs=2))
    a, b, c, d = (loop.add(text(name)) for name in "abcd")
    assert loop.abort(c)
    loop.step()
    assert loop.abort(a)
    assert not loop.abort(a)
    assert [sequence.request.id for sequence, _ in drain(loop)] == ["b", "d"]
    assert (a.finish, c.finish) == (FinishReason.ABORT, FinishReason.ABORT)
    assert sum(len(batch.rows) for batch in executor.batches) == 3
    assert not loop.abort(b)
    assert d.finish is FinishReason.STOP


@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_failed_step_ends_what_was_in_flight(where: str) -> None:
    executor = CountingExecutor(max_num_seqs=1)
    (executor.refuses if where == "launch" else executor.breaks).add(2)
    loop, _ = make(executor)
    sequences = [loop.add(text(name)) for name in "abcd"]
    # The launch of the second step fails in the second call, its result in the third.
    for _ in range(1 if where == "launch" else 2):
        loop.step()
    with pytest.raises(EngineError, match="went wrong"):
        loop.step()
    failed = loop.fail(executor.error)
    # What was launched besides is never read.
    executor.in_flight = 0
    assert [each.error for each in failed] == ["The engine failed in a step: the step went wrong"] * len(failed)
    assert sequences[1] in failed
    assert all(each.finish is FinishReason.ERROR for each in failed)
    rest = [sequence for sequence, _ in drain(loop)]
    assert rest == [each for each in sequences if each.finish is FinishReason.STOP and each in rest]
    assert all(each.finish is not None for each in sequences)
    assert not loop.has_work


def test_a_wrong_number_of_vectors_is_an_error() -> None:
    loop, executor = make()
    loop.add(text("a"))
    loop.step()
    executor.batches.clear()
    loop._flights[0].sequences.append(loop._flights[0].sequences[0])
    with pytest.raises(EngineError, match="gave 1 vectors, not 2"):
        loop.step()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("g", (1,), SamplingParams()), "does not generate"),
        (text("long", *range(11)), "at most 10"),
        (text("wild", 100), "outside 0…99"),
        (Request("empty", (), SamplingParams(max_tokens=0), pooling=PoolingParams()), "empty"),
        (text("wide", dimensions=4), "dimensions must be between 1 and 3"),
    ],
)
def test_what_can_never_run_is_refused(request_: Request, message: str) -> None:
    loop, _ = make()
    with pytest.raises(RequestError, match=message):
        loop.add(request_)
    assert not loop.has_work


def test_a_full_queue() -> None:
    loop, _ = make(max_queued=2)
    loop.add(text("a"))
    loop.add(text("b"))
    with pytest.raises(CapacityError, match="The queue is full"):
        loop.add(text("c"))


def test_the_core_drives_it() -> None:
    loop = make_loop(CountingExecutor(), EngineConfig("m", max_queued=7))
    assert isinstance(loop, PoolingLoop)
    ready = describe_ready(loop)
    assert (ready.max_model_len, ready.max_queued, ready.num_pages, ready.vocab_size) == (10, 7, 0, 100)


@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(10, 30),
    st.sets(st.integers(0, 39)),
)
def test_every_text_ends_once(lengths: list[int], rows: int, tokens: int, aborted: set[int]) -> None:
    loop, _ = make(CountingExecutor(rows, tokens))
    sequences = [loop.add(text(str(at), *range(length)), handle=at) for at, length in enumerate(lengths)]
    loop.step()
    for at in aborted & set(range(len(sequences))):
        loop.abort(sequences[at])
    done = [sequence for sequence, _ in drain(loop)]
    assert len(done) == len(set(done))
    assert {each.handle for each in done} == {
        at for at, each in enumerate(sequences) if each.finish is FinishReason.STOP
    }
    assert all(each.finish is not None for each in sequences)


def test_vectors_are_cut_before_they_are_normalized() -> None:
    row = np.array([3.0, 4.0, 12.0], dtype=np.float32)
    normal = replace(EMBED, normalize=True)
    assert finish_vector(row, PoolingParams(), EMBED).tolist() == [3.0, 4.0, 12.0]
    np.testing.assert_allclose(finish_vector(row, PoolingParams(2), normal), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(finish_vector(row, PoolingParams(normalize=True), EMBED), row / 13.0, rtol=1e-6)
    assert finish_vector(row, PoolingParams(normalize=False), normal).tolist() == [3.0, 4.0, 12.0]
    assert not finish_vector(np.zeros(3, dtype=np.float32), PoolingParams(), normal).any()


@pytest.mark.parametrize("logit", [-2000.0, -3.0, 0.0, 2.5, 2000.0])
def test_scores_pass_through_a_sigmoid_where_the_model_has_one(logit: float) -> None:
    row = np.array([logit], dtype=np.float32)
    plain = PoolingSpec(Task.SCORE, Pooling.CLS, normalize=False)
    assert finish_vector(row, PoolingParams(), plain).tolist() == [logit]
    expected = 0.0 if logit < -700 else 1.0 / (1.0 + math.exp(-logit))
    np.testing.assert_allclose(finish_vector(row, PoolingParams(), replace(plain, sigmoid=True)), [expected], rtol=1e-6)


def test_there_is_no_cache_to_tell_of() -> None:
    loop, _ = make()
    with pytest.raises(ConfigError, match=r"pools has no prefix cache to tell of; leave --kv-events-config out\."):
        open_events(loop, EngineConfig("m", kv_events_config=KvEventsConfig(True)))
    assert open_events(loop, EngineConfig("m", kv_events_config=KvEventsConfig(False))) is None
