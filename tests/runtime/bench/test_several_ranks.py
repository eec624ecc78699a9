"""Rows of several ranks are checked against the whole model once the ranks are gone, and a wrong one is found."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.bench import engine_mode


@pytest.mark.parametrize("ranks", [["--tensor-parallel-size", "2"], ["--pipeline-parallel-size", "2"]])
@pytest.mark.parametrize("broken", [False, True])
def test_rows_are_checked_against_the_whole_model(
    ranks: list[str], broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count, length = random.randint(2, 5), random.randint(9, 20)
    out = tmp_path / "rows.json"
    timed = engine_mode.time_apart

    def other_tokens(*given: Any) -> Any:
        *said, rows = timed(*given)
        return *said, [(row, replace(measured, outputs=flipped(measured.outputs))) for row, measured in rows]

    if broken:
        monkeypatch.setattr(engine_mode, "time_apart", other_tokens)
    flags = ["--shape", "tiny", "--n", str(count), "--output-len", str(length), "--max-model-len", "512"]
    status = engine_mode.main([*flags, *ranks, "--device", "cpu", "--dtype", "float32", "--json", str(out)])
    verdict = json.loads(out.read_text())["rows"][0]["verdict"]
    assert verdict["positions"] == min(count, 3) * length
    assert status == int(broken)
    assert (verdict["wrong"] > 0) == broken
    assert ("right (" in capsys.readouterr().out) != broken


def flipped(outputs: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(token ^ 1 for token in each) for each in outputs)


def test_what_ends_the_ranks_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Three ranks cannot share four heads."""
    flags = ["--shape", "tiny", "--n", "1", "--max-model-len", "512", "--tensor-parallel-size", "3", "--device", "cpu"]
    assert engine_mode.main(flags) == 2
    assert "heads" in capsys.readouterr().err
