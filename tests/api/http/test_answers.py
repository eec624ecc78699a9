"""Whole answers are written in steps, and what is written is what Python's encoder writes at once."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from waiting import longest_gap

from stoker_runtime.api.http import answers
from stoker_runtime.api.http.answers import JsonAnswer, written, written_as_it_is

SPELLINGS = ("a", "\n", '"', "\\", "é", "中", "😀", "\u2028", "\x7f", "</")


def value(pick: random.Random, depth: int = 0) -> Any:
    kind = pick.randrange(8)
    if kind < 2 or depth > 4:
        return "".join(pick.choices(SPELLINGS, k=pick.choice((0, 3, 40, 900))))
    if kind == 2:
        return [pick.gauss(0, 1) for _ in range(pick.choice((0, 1, 30, 700)))]
    if kind == 3:
        return {f"{pick.random()}": value(pick, depth + 1) for _ in range(pick.choice((0, 1, 5)))}
    if kind == 4:
        return {pick.randrange(1 << 40): value(pick, depth + 1) for _ in range(3)}
    if kind == 5:
        return tuple(value(pick, depth + 1) for _ in range(pick.choice((0, 2, 60))))
    return [value(pick, depth + 1) for _ in range(4)] if kind == 6 else pick.choice((None, True, -3, 1 << 70, 1e-300))


@pytest.mark.parametrize("step", [5, 64, 2048])
def test_steps_joined_are_the_whole(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "NODES", step)
    monkeypatch.setattr(answers, "TEXT", step)
    monkeypatch.setattr(answers, "CHARACTERS", 3)
    seed = random.randrange(1 << 32)
    pick = random.Random(seed)
    for _ in range(12):
        drawn = value(pick)
        whole = json.dumps(drawn, ensure_ascii=False, separators=(",", ":")).encode()
        assert written(drawn) == written_as_it_is(drawn) == JsonAnswer(drawn).body == whole, seed


def test_what_json_cannot_hold() -> None:
    for wrong in (float("nan"), [float("-inf")] * 9000):
        with pytest.raises(ValueError, match="not JSON compliant"):
            written(wrong)
    assert written_as_it_is({"a": float("inf"), "b": "\ud83d" * 300_000}).startswith(b'{"a":Infinity,"b":"\xed\xa0\xbd')


def test_writing_lets_other_threads_go_on() -> None:
    """Python's encoder by itself keeps the interpreter until all of it is written."""
    pick = random.Random()
    numbers = [[pick.gauss(0, 0.05) for _ in range(pick.randrange(900, 1100))] for _ in range(300)]
    entries = [{"token": "a", "bytes": [97], "top": [{"token": "b", "logprob": -pick.random()}] * 20}] * 9000
    for content in ({"data": numbers}, {"choices": [{"content": entries}]}, {"text": "é😀\n" * 2_000_000}):
        took: list[float] = []

        def timed(content: Any = content, took: list[float] = took) -> None:
            began = time.perf_counter()
            written(content)
            took.append(time.perf_counter() - began)

        assert longest_gap(timed, lambda: time.sleep(0.001)) < max(took[0] / 3, 0.1)
