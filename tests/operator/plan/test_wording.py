"""wording.py: numbers and names as a sentence has them."""

from __future__ import annotations

import pytest

from stoker_operator.plan.wording import counted, listed, sentence, short


@pytest.mark.parametrize(("number", "text"), [(0, "0 pods"), (1, "1 pod"), (2, "2 pods")])
def test_a_number_has_its_noun(number: int, text: str) -> None:
    assert counted(number, "pod") == text


@pytest.mark.parametrize(("names", "text"), [(["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")])
def test_names_in_a_row(names: list[str], text: str) -> None:
    assert listed(names, "or") == text


@pytest.mark.parametrize(("text", "whole"), [("it is", "it is."), ("it is.", "it is."), ("is it?", "is it?")])
def test_a_sentence_ends_once(text: str, whole: str) -> None:
    assert sentence(text) == whole


def test_a_long_text_is_one_line_and_cut() -> None:
    assert short("a\n  b") == "a b"
    assert (len(short("x" * 900)), short("x" * 900)[-1]) == (400, "…")
