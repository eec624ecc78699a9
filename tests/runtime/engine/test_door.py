"""The engine's door: whatever a message or a caller says, the engine goes on, and everybody gets an answer.

Over the real executor on the CPU, with a model that names an id beyond its vocabulary as the end of a text.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_runtime import LLM, SamplingParams
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.core import READ_SECONDS, EngineCore, make_loop
from stoker_runtime.engine.messages import Add, Refused, Step, Stop, decode, encode
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import RequestError
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Constraint, ConstraintKind, Request
from stoker_runtime.request import SamplingParams as EngineParams

VOCAB = SHAPES["tiny"]["vocab_size"]
GOOD = Request("good", (5, 9, 2), EngineParams(max_tokens=4, temperature=0.0))
# `LLM` and the messages both have it: an id that the vocabulary does not.
ENDS = [257, VOCAB + 741]


class Script:
    """A socket whose client sends these messages, and `Stop` once all `handles` have answers and the loop is idle.

    An odd message may be a request like any other.
    """

    def __init__(self, loop: StepLoop, sent: list[bytes], handles: set[int]) -> None:
        self._loop = loop
        self._sent = deque(sent)
        self._open = set(handles)
        self._stopped = False
        self._tokens: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}

    def poll(self, timeout: int) -> bool:
        if not (self._sent or self._open or self._stopped or self._loop.has_work):
            self._stopped = True
            self._sent.append(encode(Stop()))
        return bool(self._sent)

    def recv_multipart(self) -> tuple[bytes, bytes]:
        return b"client", self._sent.popleft()

    def send_multipart(self, parts: tuple[bytes, bytes], flags: int) -> None:
        message = decode(parts[1])
        if isinstance(message, Refused):
            self._end(message.handle, "refused")
        elif isinstance(message, Step):
            for handle, token in zip(message.handles, message.tokens, strict=True):
                self._tokens.setdefault(handle, []).append(token)
            for each in message.finished:
                self._end(each.handle, each.reason.value)

    def tokens(self, handle: int) -> list[int]:
        return self._tokens.get(handle, [])

    def _end(self, handle: int, how: str) -> None:
        assert handle not in self.finished, "two ends"
        self.finished[handle] = how
        self._open.discard(handle)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepLoop]:
    """A tiny random model whose configuration names two ends."""
    from stoker_runtime.bench.checkpoints import write_checkpoint

    folder: Path = tmp_path_factory.mktemp("ends")
    write_checkpoint("tiny", folder)
    config = SHAPES["tiny"] | {"eos_token_id": ENDS}
    (folder / "config.json").write_text(json.dumps(config))
    engine = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_model_len=64, cpu_kv_gb=0.01)
    executor = build_executor(engine)
    loop = make_loop(executor, engine)
    assert isinstance(loop, StepLoop)
    yield loop
    executor.close()


def answers(loop: StepLoop, sent: list[bytes], handles: set[int]) -> Script:
    """What a client that sends `sent` hears, until all of `handles` have ended."""
    script = Script(loop, sent, handles)
    EngineCore(loop, script).run()  # type: ignore[arg-type]
    assert not loop.has_work
    loop.scheduler.check()
    return script


@pytest.fixture(scope="module")
def alone(loop: StepLoop) -> list[int]:
    """The tokens of the good request when nothing else runs."""
    return answers(loop, [encode(Add(1, GOOD))], {1}).tokens(1)


near = st.integers(-2, 4) | st.integers(VOCAB - 3, VOCAB + 2) | st.integers(-(1 << 63), (1 << 63) - 1)
ids = st.lists(st.integers(0, VOCAB - 1) | near, max_size=6).map(tuple)
any_float = st.floats() | st.floats(0, 2) | st.just(0.0) | st.just(1.0)
TEXTS = ("", "[a-z]+", "{}", '{"type": "integer"}', "root ::= [ab]", "start: /x+/", "((((", '"\\ud800"')
texts = st.sampled_from(TEXTS)
PARAMS = {
    "max_tokens": st.integers(0, 7) | near,
    "min_tokens": st.integers(0, 3) | near,
    "temperature": any_float,
    "top_p": any_float,
    "top_k": near,
    "min_p": any_float,
    "typical_p": any_float,
    "repetition_penalty": any_float,
    "frequency_penalty": any_float,
    "presence_penalty": any_float,
    "seed": st.none() | near,
    "logprobs": st.none() | near,
    "prompt_logprobs": st.none() | st.integers(0, 60) | near,
    "logit_bias": st.lists(st.tuples(st.integers(0, VOCAB - 1) | near, any_float), max_size=4).map(tuple),
    "stop_token_ids": ids | st.just(tuple(range(65))),
    "ignore_eos": st.booleans(),
    "allowed_token_ids": ids,
    "bad_words": st.lists(ids, max_size=3).map(tuple),
    "constraint": st.none() | st.builds(Constraint, st.sampled_from(ConstraintKind), texts, st.sampled_from(["", "x"])),
}
assert set(PARAMS) == {field.name for field in fields(EngineParams)}, "every parameter is fuzzed"
# One strange value at a time shows what each does; many at once would nearly always be refused for the first.
strange = st.sampled_from(sorted(PARAMS)).flatmap(lambda name: st.fixed_dictionaries({name: PARAMS[name]}))
params = st.fixed_dictionaries({}, optional=PARAMS) | strange | st.tuples(strange, strange).map(lambda p: p[0] | p[1])
requests = st.builds(
    lambda prompt, given, more: Request("odd", prompt, replace(EngineParams(max_tokens=5), **given), **more),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple)
    | st.lists(st.integers(-1, VOCAB + 1)).map(tuple)
    | st.just((3,) * 70),
    params,
    st.fixed_dictionaries(
        {},
        optional={
            "arrival": st.floats(),
            "priority": near,
            "cache_salt": st.text(max_size=3),
            "family": st.sampled_from(["", "f"]),
            "session": st.text(max_size=2),
        },
    ),
)
LAX = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@LAX
@given(st.lists(requests, min_size=1, max_size=5))
def test_no_request_ends_the_engine(loop: StepLoop, alone: list[int], odd: list[Request]) -> None:
    sent = [encode(Add(handle, each)) for handle, each in enumerate([*odd, GOOD])]
    script = answers(loop, sent, set(range(len(sent))))
    assert script.tokens(len(odd)) == alone, "a neighbour's text changed"


garbage = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(0, 9) | st.text(), inner, max_size=3),
    max_leaves=12,
)


@LAX
@given(st.data())
def test_no_message_ends_the_engine(loop: StepLoop, alone: list[int], data: st.DataObject) -> None:
    wire: Any = msgpack.unpackb(encode(Add(0, GOOD)), use_list=True)
    at = data.draw(st.integers(0, len(wire) - 1))
    if at == 4:
        # One of the sampling parameters.
        wire[at][data.draw(st.integers(0, len(wire[at]) - 1))] = data.draw(garbage)
    else:
        # Neither another kind of message, nor the handle of the good request: that would end twice, and rightly.
        taken: dict[int, tuple[int, ...]] = {0: (0, 3), 1: (1,)}
        wire[at] = data.draw(garbage.filter(lambda value: value not in taken.get(at, ())))
    odd = data.draw(st.sampled_from([msgpack.packb(wire), msgpack.packb(wire[:-1]), b"\xc1", b""]))
    script = answers(loop, [odd, encode(Add(1, GOOD))], {1})
    assert script.tokens(1) == alone


class Slow(Script):
    """A client whose every message takes a while to read, as those with long prompts do."""

    steps_between = 0

    def recv_multipart(self) -> tuple[bytes, bytes]:
        time.sleep(READ_SECONDS * 0.4)
        return super().recv_multipart()

    def send_multipart(self, parts: tuple[bytes, bytes], flags: int) -> None:
        super().send_multipart(parts, flags)
        if self._sent and self.tokens(0):
            self.steps_between += 1


def test_what_runs_goes_on_while_many_requests_are_read(loop: StepLoop, alone: list[int]) -> None:
    handles = range(random.randrange(40, 60))
    script = Slow(loop, [encode(Add(handle, GOOD)) for handle in handles], set(handles))
    EngineCore(loop, script).run()  # type: ignore[arg-type]
    assert script.steps_between > 3
    assert all(script.tokens(handle) == alone for handle in handles)


def test_an_unreadable_request_is_refused_by_its_handle(loop: StepLoop) -> None:
    wire: Any = msgpack.unpackb(encode(Add(17, GOOD)), use_list=True)
    wire[3] = b"\x00\x01\x02"
    assert answers(loop, [msgpack.packb(wire)], {17}).finished == {17: "refused"}


def test_an_end_beyond_the_vocabulary_is_no_end(loop: StepLoop) -> None:
    asked = replace(GOOD, params=replace(GOOD.params, min_tokens=3, temperature=0.7, seed=4))
    script = answers(loop, [encode(Add(6, asked))], {6})
    assert 3 <= len(script.tokens(6)) <= 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 50),
        ("logprobs", 33),
        ("logit_bias", {VOCAB + 40: 1.5}),
        ("logit_bias", {-3: 1.5}),
        ("allowed_token_ids", [4, VOCAB]),
        ("stop_token_ids", [1 << 40]),
        ("bad_words", [[2, VOCAB + 9]]),
        ("temperature", float("nan")),
        ("top_p", "0.5"),
        ("max_tokens", 3.5),
        ("repetition_penalty", float("inf")),
        ("allowed_token_ids", ["7"]),
    ],
)
def test_the_python_interface_says_what_is_wrong(loop: StepLoop, field: str, value: object) -> None:
    llm = LLM.over(loop.executor, EngineConfig(model="shape:tiny"))
    with pytest.raises(RequestError) as wrong:
        llm.generate_tokens([(1, 2, 3)], SamplingParams(**{field: value}))  # type: ignore[arg-type]
    assert wrong.value.param == field
    assert len(llm.generate_tokens([(1, 2, 3)], SamplingParams(max_tokens=3, ignore_eos=True))[0]) == 3
