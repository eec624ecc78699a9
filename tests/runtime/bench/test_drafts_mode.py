"""`stoker bench drafts`: every k is timed, both sides say the same, and prompts of a kind are what the kind says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker_runtime.bench import drafts_mode
from stoker_runtime.bench.drafts_mode import KINDS, Forced, read_sources, real_prompts
from stoker_runtime.bench.random_checkpoint import byte_tokenizer
from stoker_runtime.drafts.pace import RowPace
from stoker_runtime.errors import ConfigError
from stoker_runtime.text.tokenizer import Tokenizer

SIZES = ["--device", "cpu", "--max-model-len", "256", "--input-len", "24", "--output-len", "14", "--max-num-seqs", "4"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return Tokenizer.load(str(tmp_path))


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp32 on a CPU a text with drafts is the one without."""
    written = tmp_path / "rows.json"
    assert drafts_mode.main(["--shape", "tiny", "--n", "1,3", "--json", str(written), *SIZES]) == 0
    found = json.loads(written.read_text())
    assert [(each["n"], each["k"]) for each in found["costs"]] == [(n, k) for n in (1, 3) for k in range(4)]
    assert all(each["step_ms"] > 0 for each in found["costs"])
    assert [each["plain"] for each in found["costs"] if each["k"] == 0] == [1.0, 1.0]
    assert [(each["n"], each["kind"], each["same"]) for each in found["gains"]] == [(1, "random", 1), (3, "random", 3)]
    assert "3 of 3 texts the same" in capsys.readouterr().out


def test_what_is_forced_is_taken_whatever_it_brings() -> None:
    pace = Forced(3, 16)
    hopeless = RowPace(0.0, 0.0)
    for k in (0, 1, 3):
        pace.k = k
        assert pace.choose([hopeless, None, hopeless], changed=True) == (k, (k, 0, k))
    assert pace.choose([hopeless] * 5, changed=True) == (0, (0,) * 5)  # 20 tokens are more than 16


def test_prompts_of_each_kind(tokenizer: Tokenizer) -> None:
    text = "\n".join(f"def function_{i}(value): return value + {i}" for i in range(60))
    new, copied, renamed, extracted = (
        [tokenizer.decode(list(prompt)) for prompt in real_prompts(kind, 3, 300, text, tokenizer)]
        for kind in ("new", "copied", "renamed", "extracted")
    )
    assert len(set(new)) == 3
    for piece, copy, name, listing in zip(new, copied, renamed, extracted, strict=True):
        assert piece in text
        assert copy.count(piece[: drafts_mode.BEGUN]) == 2
        assert copy.endswith(piece[: drafts_mode.BEGUN])
        assert "value_2" in name or "return_2" in name
        assert listing.endswith("\n0: ")
    assert set(KINDS) == {"new", "copied", "renamed", "extracted"}


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--text is too short for 2 prompts"):
        real_prompts("new", 2, 500, "one line", tokenizer)
    with pytest.raises(ConfigError, match=r"--text .*none.txt cannot be read"):
        read_sources(tmp_path / "none.txt")
    assert "def wrap" in read_sources(None)
    assert drafts_mode.main(["--shape", "tiny", "--speculative-config", "", *SIZES]) == 2
    assert "--speculative-config says what drafts" in capsys.readouterr().err
