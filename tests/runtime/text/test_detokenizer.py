"""Incremental text: whatever the tokens, pieces joined are the whole, and stop strings are found wherever they fall."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_runtime.text.detokenizer import Detokenizer
from stoker_runtime.text.tokenizer import Tokenizer

BYTES = Tokenizer.synthetic(256)
CHUNKS = st.lists(st.lists(st.integers(0, 255), max_size=5), max_size=30)
TEXTS = st.text(alphabet="abc日🙂 ", max_size=40)
STOPS = st.lists(st.text(alphabet="abc日🙂 ", min_size=1, max_size=4), min_size=1, max_size=3)


def run(chunks: list[list[int]], detokenizer: Detokenizer) -> list[str]:
    pieces = [detokenizer.push(chunk) for chunk in chunks]
    return [*pieces, detokenizer.finish()]


def cut(raw: bytes, sizes: list[int]) -> list[list[int]]:
    """`raw` in chunks of these sizes, the rest one by one."""
    chunks, at = [], 0
    for size in sizes:
        chunks.append(list(raw[at : at + size]))
        at += size
    return chunks + [[byte] for byte in raw[at:]]


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: read on until the text ends with a stop string; the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@given(CHUNKS)
def test_pieces_joined_are_the_whole_also_of_bytes_that_are_no_text(chunks: list[list[int]]) -> None:
    whole = bytes(byte for chunk in chunks for byte in chunk).decode("utf-8", errors="replace")
    assert "".join(run(chunks, Detokenizer(BYTES))) == whole


@given(TEXTS, st.lists(st.integers(0, 4), max_size=20))
def test_no_piece_ends_inside_a_character(text: str, sizes: list[int]) -> None:
    assert all("\ufffd" not in piece for piece in run(cut(text.encode(), sizes), Detokenizer(BYTES)))


@settings(max_examples=300)
@given(TEXTS, STOPS, st.lists(st.integers(0, 6), max_size=20), st.booleans())
def test_stop_strings_at_any_cut(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    detokenizer = Detokenizer(BYTES, stops, include_stop=include)
    said = "".join(run(cut(text.encode(), sizes), detokenizer))
    expected = first_stop(text, stops)
    if expected is None:
        assert (said, detokenizer.stopped_by) == (text, None)
    else:
        at, stop = expected
        assert (said, detokenizer.stopped_by) == (text[: at + len(stop) * include], stop)


@given(TEXTS, STOPS)
def test_nothing_of_a_stop_string_is_given_out_early(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(BYTES, stops)
    said = ""
    for byte in text.encode():
        said += detokenizer.push([byte])
        expected = first_stop(text, stops)
        assert text.startswith(said)
        assert expected is None or len(said) <= expected[0]


def test_without_search_a_stop_string_is_text() -> None:
    detokenizer = Detokenizer(BYTES, ["bc"])
    assert detokenizer.push(b"ab", search=False) == "ab"
    assert detokenizer.push(b"c", search=False) == "c"
    assert detokenizer.push(b"bcx") == ""
    assert detokenizer.stopped_by == "bc"


def test_held_text_comes_out_when_the_search_is_off() -> None:
    detokenizer = Detokenizer(BYTES, ["abc"])
    assert detokenizer.push(b"xab") == "x"
    assert detokenizer.push(b"z", search=False) == "abz"


def test_incomplete_character_at_the_end_is_replaced() -> None:
    detokenizer = Detokenizer(BYTES, ["stop"])
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("stops", [(), ("never said",)])
def test_cost_per_token_does_not_grow_with_the_text(stops: tuple[str, ...]) -> None:
    def seconds(tokens: int) -> float:
        best = float("inf")
        for _ in range(5):
            detokenizer = Detokenizer(BYTES, stops)
            began = time.perf_counter()
            for _ in range(tokens):
                detokenizer.push((97,))
            best = min(best, time.perf_counter() - began)
        return best / tokens

    assert seconds(20_000) < 10 * seconds(1_000)
