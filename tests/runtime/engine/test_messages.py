"""Every message survives the wire."""

from __future__ import annotations

from array import array

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_runtime.engine.messages import (
    Abort,
    Add,
    Failed,
    Finished,
    Hello,
    Message,
    Ready,
    Refused,
    Sleep,
    Started,
    Step,
    Stop,
    Wake,
    decode,
    encode,
)
from stoker_runtime.errors import CapacityError, EngineError, ModelError, RequestError, StokerError
from stoker_runtime.request import (
    Constraint,
    ConstraintKind,
    EngineStats,
    FinishReason,
    PoolingParams,
    Request,
    SamplingParams,
    TokenLogprobs,
)

LOGPROBS = TokenLogprobs(-0.5, 3, ((7, -0.5), (9, -1.25)))


@pytest.mark.parametrize(
    "message",
    [
        Hello(),
        Stop(),
        Abort((1, 2, 3)),
        Sleep(9, 2, abort=True),
        Wake(9, ("kv_cache",)),
        Ready(12, 4096, 256, 8192, 1000, 16, 50_000, 4096, (2, 5), {"device": "cpu"}),
        Add(7, Request("r", (1, 2, 3), SamplingParams(logit_bias=((3, -1.5),), stop_token_ids=(4,)), 1.5, -2, "salt")),
        Add(8, Request("p", (1, 2), SamplingParams(max_tokens=0), pooling=PoolingParams(64, False, 1))),
        Add(8, Request("r", (1,), SamplingParams(), family="choices", session="talk")),
        Step(EngineStats(steps=3, step_seconds=0.25), 5),
        Step(
            EngineStats(),
            handles=array("q", [1, 1 << 40]),
            tokens=array("i", [5, 6]),
            started=[Started(1, 16, 0.5)],
            finished=[Finished(1, FinishReason.STOP, 6, None), Finished(2, FinishReason.ERROR, None, "why")],
            logprobs=[LOGPROBS, None],
            prompt_logprobs=[(1, [LOGPROBS, LOGPROBS])],
            vectors=[(1, b"\x00\x01\x02\x03"), (2, b"")],
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(0, 1 << 31),
        temperature=st.floats(0, 2),
        seed=st.none() | st.integers(-(1 << 63), (1 << 64) - 1),
        logprobs=st.none() | st.integers(0, 20),
        logit_bias=st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(-100, 100))).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 1 << 20)).map(tuple),
        ignore_eos=st.booleans(),
        allowed_token_ids=st.lists(st.integers(0, 1 << 20)).map(tuple),
        bad_words=st.lists(st.lists(st.integers(0, 1 << 20)).map(tuple)).map(tuple),
        constraint=st.none() | st.builds(Constraint, st.sampled_from(ConstraintKind), st.text(), st.text()),
    ),
    st.lists(st.integers(0, (1 << 31) - 1)).map(tuple),
    st.text(),
)
def test_any_request_survives_the_wire(params: SamplingParams, prompt: tuple[int, ...], salt: str) -> None:
    message = Add(1, Request("r", prompt, params, cache_salt=salt))
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "error",
    [
        RequestError("too long", param="prompt", code="context_length_exceeded"),
        ModelError("no such file"),
        CapacityError("full"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_class_and_their_fields(error: StokerError) -> None:
    if isinstance(error, CapacityError):
        error.retry_after = 7.5
    refused, failed = decode(encode(Refused(3, error))), decode(encode(Failed(error)))
    assert isinstance(refused, Refused)
    assert isinstance(failed, Failed)
    for arrived in (refused.error, failed.error):
        assert type(arrived) is type(error)
        assert (arrived.message, arrived.param, arrived.code) == (error.message, error.param, error.code)
        assert getattr(arrived, "retry_after", None) == getattr(error, "retry_after", None)
    assert refused.handle == 3


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(EngineError, match="unknown kind 77"):
        decode(msgpack.packb((77,)))


def test_a_step_of_many_sequences_is_small() -> None:
    step = Step(EngineStats(), handles=array("q", range(1024)), tokens=array("i", range(1024)))
    assert len(encode(step)) < 1024 * 12 + 200
