"""A large text is read in steps: the outcome is that of a parser of the whole."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic_core import from_json

from stoker_runtime.api.http import large_json
from stoker_runtime.api.http.large_json import read_large
from stoker_runtime.errors import RequestError

SPELLINGS = ("a", "\n", '"', "\\", "é", "中", "😀", "\u2028", "[", "1,2,3", ",", "{")


@pytest.fixture(params=(23, 97, 1009))
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Steps so short that everything is cut everywhere."""
    monkeypatch.setattr(large_json, "PIECE", request.param)
    return int(request.param)


def text(pick: random.Random) -> str:
    return "".join(pick.choices(SPELLINGS, k=pick.choice((3, 30, 400, 700))))


def value(pick: random.Random, depth: int = 0) -> Any:
    kind = pick.randrange(7)
    if kind == 0 or depth > 4:
        return text(pick)
    if kind == 1:
        return pick.choices((1, -3, 4.5, 1e9, 12345), k=pick.choice((0, 1, 20, 500)))
    if kind == 2:
        return {text(pick): value(pick, depth + 1) for _ in range(3)}
    if kind == 3:
        return [value(pick, depth + 1) for _ in range(4)]
    if kind == 4:
        return pick.choice((None, True, 1, 2.5))
    return [[1] * pick.choice((1, 70))] * 3 if kind == 5 else [text(pick)]


def outcome(raw: bytes) -> Any:
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError:
        return ValueError


def test_it_is_what_a_parser_of_the_whole_gives(piece: int) -> None:
    pick = random.Random()
    for _ in range(120):
        wanted = value(pick)
        for layout in ({}, {"ensure_ascii": False}, {"indent": 3}):
            raw = json.dumps(wanted, **layout).encode()  # type: ignore[arg-type]
            assert read_large(raw) == wanted
            broken = bytearray(raw)
            broken[pick.randrange(len(raw))] = pick.randrange(256)
            try:
                found = read_large(bytes(broken))
            except RequestError:
                found = ValueError
            assert found == outcome(bytes(broken)), bytes(broken)


def test_what_is_no_json_is_said(piece: int) -> None:
    for raw in (
        b'{"a": "' + b"x" * 3000,
        b'["' + b"\\" * 3001,
        b'["' + b"\\ud83d" * 400 + b'"]',
        b"[" + b"1," * 900 + b"]",
        b'["' + b"\x80" * 3000 + b'"]',
        b"[" * 3000,
    ):
        with pytest.raises(RequestError, match="The body is not valid JSON"):
            read_large(raw)


def test_the_name_that_stands_for_what_was_cut_out_cannot_be_guessed() -> None:
    raw = json.dumps(["x" * 1000, *(f"{at}" for at in range(9))]).encode()
    assert read_large(raw) == json.loads(raw)
