"""Rows of several ranks are checked against the whole model once the ranks are gone, and a wrong one is found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.bench import engine_mode
from stoker_runtime.bench.rounds import Round


@pytest.mark.parametrize("ranks", [["--tensor-parallel-size", "2"], ["--pipeline-parallel-size", "2"]])
@pytest.mark.parametrize("broken", [False, True])
def test_rows_are_checked_against_the_whole_model(
    ranks: list[str], broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count, length = random.randint(2, 5), random.randint(9, 20)
    out = tmp_path / "rows.json"
    timed = engine_mode.time_row

    def other_tokens(*given: Any) -> tuple[Any, Round]:
        row, measured = timed(*given)
        wrong = tuple(tuple(token ^ 1 for token in each) for each in measured.outputs)
        return row, Round(measured.wall, measured.latencies, measured.prompts, wrong)

    if broken:
        monkeypatch.setattr(engine_mode, "time_row", other_tokens)
    flags = ["--shape", "tiny", "--n", str(count), "--output-len", str(length), "--max-model-len", "512"]
    status = engine_mode.main([*flags, *ranks, "--device", "cpu", "--dtype", "float32", "--json", str(out)])
    verdict = json.loads(out.read_text())["rows"][0]["verdict"]
    assert verdict["positions"] == min(count, 3) * length
    assert status == int(broken)
    assert (verdict["wrong"] > 0) == broken
    assert "not checked" in capsys.readouterr().out
