"""`stoker bench offline`: both ways run the same work, tokens are checked, and what is dear or wrong fails."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stoker_runtime.bench import offline_mode as mode
from stoker_runtime.bench.rounds import Round, Work
from stoker_runtime.offline.llm import LLM

INPUT, OUTPUT = random.randrange(5, 20), random.randrange(8, 24)
SIZES = ["--device", "cpu", "--input-len", str(INPUT), "--output-len", str(OUTPUT), "--max-model-len", "64"]


def test_both_ways_are_measured_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, n = tmp_path / "rows.json", random.randrange(3, 9)
    assert mode.main(["--shape", "tiny", "--n", f"1,{n}", *SIZES, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["n"], row["tokens"]) for row in rows] == [(1, OUTPUT), (n, n * OUTPUT)]
    for row in rows:
        assert row["passed"]
        assert row["bare"]["positions"] == row["generate"]["positions"] == OUTPUT * min(row["n"], 3)
        assert row["cost"] == pytest.approx(row["generate_s"] / row["bare_s"] - 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in lines] == ["N", "1", str(n)]
    assert all("right" in line for line in lines[1:])


def test_wrong_tokens_of_generate_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = mode.generated

    def wrong(llm: LLM, work: Work, seed: int) -> Round:
        found = right(llm, work, seed)
        return replace(found, outputs=tuple(tuple((token + 1) % 200 for token in each) for each in found.outputs))

    monkeypatch.setattr(mode, "generated", wrong)
    assert mode.main(["--shape", "tiny", "--n", "2", *SIZES]) == 1
    assert "WRONG (generate)" in capsys.readouterr().out


def test_what_generate_does_besides_is_counted_and_may_be_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def slow(self: LLM, *args: object, **more: object) -> object:
        time.sleep(0.2)
        return generate(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "generate", slow)
    work = ["--shape", "tiny", "--n", "1", *SIZES]
    assert mode.main([*work, "--at-most", "1"]) == 1
    assert mode.main([*work, "--at-most", "1e9"]) == 0


@pytest.mark.parametrize("flag", [["--top-k", "5"], ["--structured"], ["--uniform", "3-9"]])
def test_what_it_does_not_measure_is_refused_by_name(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert mode.main(["--shape", "tiny", *flag]) == 2
    assert flag[0] in capsys.readouterr().err
