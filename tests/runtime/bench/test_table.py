"""A row says how many of its requests were checked."""

from __future__ import annotations

import pytest

from stoker_runtime.bench.table import Row, cells
from stoker_runtime.bench.verify import Verdict


@pytest.mark.parametrize(("wrong", "word"), [(0, "right"), (2, "WRONG (2 of")])
def test_a_cell_says_how_many_requests_were_checked(wrong: int, word: str) -> None:
    verdict = Verdict(sequences=3, positions=383, ties=1, wrong=wrong, worst=0.1, mean=0.01, most_mean=0.5)
    row = Row("x", 217, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, verdict, {"vllm_tok_s": 0.5})
    found = cells(row)
    assert found[-1].startswith(word)
    assert "3 of 217 requests, 383 tokens" in found[-1]
    assert (found[3] == "-") is bool(wrong)
