"""`stoker bench drafts`: every k is timed, both sides say the same, and prompts of a kind are what the kind says."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from stoker_runtime.bench import drafts_mode
from stoker_runtime.bench.checkpoints import byte_tokenizer
from stoker_runtime.bench.drafts_mode import Case, Forced, Gain, gain, print_gains, timed_cases
from stoker_runtime.bench.drafts_texts import BEGUN, KINDS, read_sources, real_prompts
from stoker_runtime.bench.rounds import random_prompts
from stoker_runtime.bench.verify import Verdict
from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.pace import RowPace
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.text.tokenizer import Tokenizer

SIZES = ["--device", "cpu", "--max-model-len", "256", "--input-len", "24", "--output-len", "14", "--max-num-seqs", "4"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return Tokenizer.load(str(tmp_path))


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 on a CPU a text with drafts is the one without; each engine is gone before the next one is made."""
    made: list[tuple[weakref.ref[Executor], weakref.ref[Tensor]]] = []

    def build(config: EngineConfig) -> Executor:
        assert not any(part() for each in made for part in each), "an engine's memory is still taken"
        executor = build_executor(config)
        made.append((weakref.ref(executor), weakref.ref(executor.arena)))
        return executor

    monkeypatch.setattr(drafts_mode, "build_executor", build)
    written = tmp_path / "rows.json"
    assert drafts_mode.main(["--shape", "tiny", "--n", "1,3", "--json", str(written), *SIZES]) == 0
    found, shown = json.loads(written.read_text()), capsys.readouterr().out
    assert len(made) == 3
    ladder = (0, 1, 2, 3, 4, 6, 8, 12, 16)
    assert [(each["n"], each["k"]) for each in found["costs"]] == [(n, k) for n in (1, 3) for k in ladder]
    assert all(each["step_ms"] > 0 for each in found["costs"])
    assert [each["plain"] for each in found["costs"] if each["k"] == 0] == [1.0, 1.0]
    ways = ("suffix, up to 16 tokens", "ngram, up to 8 tokens")
    rows = [(each["n"], each["kind"], each["same"], each["drafts"]) for each in found["gains"]]
    assert rows == [(n, kind, n, way) for way in ways for kind in ("random", "drawn") for n in (1, 3)]
    for each in found["gains"]:
        assert each["ratio"] == each["on_tok_s"] / each["off_tok_s"]
        assert each["passed"]
    assert shown.count("3 of 3 texts the same") == 4


def test_what_is_named_drafts_alone(tmp_path: Path) -> None:
    written = tmp_path / "rows.json"
    named = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}', "--json", str(written)]
    assert drafts_mode.main(["--shape", "tiny", "--n", "2", *named, *SIZES]) == 0
    found = json.loads(written.read_text())
    assert {each["drafts"] for each in found["gains"]} == {"ngram, up to 5 tokens"}
    assert [each["k"] for each in found["costs"]] == [0, 1, 2, 3, 4, 5]


def test_a_changed_text_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right texts differ where roundings do; a wrong one ends the run, and where bits are promised any other does."""
    config = EngineConfig(model="shape:tiny", device="cpu", max_model_len=128, speculative_config=drafts_mode.NGRAM)
    executor = build_executor(config)
    case = Case("random", 2, tuple(random_prompts([9, 31], executor.vocab_size, 77)))
    right = timed_cases(executor, [case], 12)[0]
    for wrong, (same, passed) in (((), (2, True)), ((0,), (1, False)), ((0, 1), (0, False))):
        texts = [tuple(7 if i in wrong else token for token in text) for i, text in enumerate(right.outputs)]
        found = gain(executor, case, right, replace(right, outputs=tuple(texts)))
        assert (found.same, found.passed) == (same, passed)
        print_gains([found])
        assert ("WRONG" in capsys.readouterr().out) != passed
    executor.close()
    tie = Verdict(1, 12, 1, 0, 0.01, 0.001, 0.05)
    changed = Gain(2, 2, "new", "ngram", 10.0, 13.0, 4, 12, 9, 1, tie, bound=False)
    assert changed.passed
    assert not replace(changed, bound=True).passed
    assert (changed.ratio, changed.acceptance, changed.length) == (1.3, 0.75, 3.25)


def test_few_at_a_time_are_the_same_texts() -> None:
    """Five prompts, two at a time: the last one alone."""
    executor = build_executor(EngineConfig(model="shape:tiny", device="cpu", max_model_len=128))
    prompts = tuple(random_prompts([9, 31, 4, 17, 22], executor.vocab_size, 7))
    together, apart = (timed_cases(executor, [Case("new", n, prompts)], 12)[0] for n in (5, 2))
    assert apart.outputs == together.outputs
    assert (together.steps, apart.steps) == (12, 36)
    executor.close()


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
        assert copy.count(piece[: BEGUN]) == 2
        assert copy.endswith(piece[: BEGUN])
        assert "value_2" in name or "return_2" in name
        assert listing.endswith("\n0: ")
    assert set(KINDS) == {"new", "copied", "renamed", "extracted"}


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--text is too short for 2 prompts"):
        real_prompts("new", 2, 500, "one line", tokenizer)
    with pytest.raises(ConfigError, match=r"--text .*none.txt cannot be read"):
        read_sources([tmp_path / "none.txt"])
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("one")
    second.write_text("two")
    assert read_sources([first, second]) == "one\ntwo"
    assert "def wrap" in read_sources([])
    assert drafts_mode.main(["--shape", "tiny", "--speculative-config", '{"method": "medusa"}', *SIZES]) == 2
    assert "Medusa heads are not there yet" in capsys.readouterr().err


@pytest.mark.gpu
def test_engines_take_a_gpu_in_turn(tmp_path: Path) -> None:
    """Each of the three takes most of it."""
    written = tmp_path / "rows.json"
    sizes = ["--max-model-len", "512", "--input-len", "70", "--output-len", "45", "--max-num-seqs", "8"]
    given = ["--shape", "qwen3-0.6b", "--device", "cuda", "--n", "1,5", "--json", str(written), *sizes]
    assert drafts_mode.main(given) == 0
    found = json.loads(written.read_text())
    assert [(each["n"], each["passed"]) for each in found["gains"]] == [(1, True), (5, True)] * 4
