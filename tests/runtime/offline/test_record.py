"""How the tokens of a finished sequence become text: together, unless stop strings are looked for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stoker_runtime.offline.record import STEPS_A_ROUND, Record, Rounds
from stoker_runtime.request import FinishReason
from stoker_runtime.text.detokenizer import Detokenizer


class Letters:
    """Token 97 is "a", and so on; what was asked for together is kept."""

    special_ids: frozenset[int] = frozenset({3})

    @staticmethod
    def bytes_of(tokens: Sequence[int], skip: frozenset[int]) -> bytes:
        return bytes(token for token in tokens if token not in skip)


class Pushes(Detokenizer):
    def __init__(self, stops: tuple[str, ...]) -> None:
        tokenizer: Any = Letters()
        super().__init__(tokenizer, stops)
        self.pieces: list[int] = []

    def push(self, tokens: Sequence[int], search: bool = True) -> str:
        self.pieces.append(len(tokens))
        return super().push(tokens, search)


def ended(text: bytes, finish: FinishReason = FinishReason.LENGTH) -> Any:
    params = SimpleNamespace(min_tokens=0, logprobs=None, max_tokens=len(text))
    tokens = array("i", [1, 2, *text])
    return SimpleNamespace(tokens=tokens, prompt_length=2, finish=finish, complete=False, params=params, stop_token=3)


@pytest.mark.parametrize(("stops", "pieces"), [((), [7]), (("zz",), [1] * 7)])
def test_text_without_stop_strings_is_made_at_once(stops: tuple[str, ...], pieces: list[int]) -> None:
    detokenizer = Pushes(stops)
    done = Record(ended(b"grey\x03as"), detokenizer).completion(0, None)
    assert done.text == "greyas"
    assert len(done.token_ids) == 7
    assert detokenizer.pieces == pieces


def test_the_id_that_ended_it_is_no_text() -> None:
    assert Record(ended(b"moss!", FinishReason.STOP), Pushes(())).completion(0, None).text == "moss"


def test_records_are_read_in_turn_while_steps_run() -> None:
    spoken = [b"rye", b"oats and barley", b"", *(bytes([at]) * (at % 7) for at in range(97, 120))]
    sequences = [ended(b"") for _ in spoken]
    for each in sequences:
        each.finish = None
    pushes = [Pushes(()) for _ in spoken]
    records = [Record(sequence, each) for sequence, each in zip(sequences, pushes, strict=True)]
    rounds = Rounds(records)
    for at in range(max(map(len, spoken))):
        for sequence, text in zip(sequences, spoken, strict=True):
            sequence.tokens.extend(text[at : at + 1])
        rounds.step()
    for _ in range(STEPS_A_ROUND):
        rounds.step()
    assert [sum(each.pieces) for each in pushes] == list(map(len, spoken)), "nothing is left for the end"
    for sequence, text in zip(sequences, spoken, strict=True):
        sequence.finish, sequence.params = FinishReason.LENGTH, SimpleNamespace(logprobs=None, max_tokens=len(text))
    for _ in range(STEPS_A_ROUND):
        rounds.step()
    assert [each.completion(0, None).text.encode() for each in records] == spoken
