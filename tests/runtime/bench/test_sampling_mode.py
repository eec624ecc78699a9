"""`stoker bench sampling`: right samples pass its check, wrong ones do not, and its rows are those of all its ways."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker_runtime.bench.rounds import GREEDY
from stoker_runtime.bench.sampling import check as checks
from stoker_runtime.bench.sampling import mode
from stoker_runtime.bench.sampling.check import verify_sampled
from stoker_runtime.request import SamplingParams

TOKENS, VOCAB = 400, 500
WARM = SamplingParams(temperature=0.8)
WAYS = {
    "temperature": WARM,
    "top_k": replace(WARM, top_k=17),
    "top_p": replace(WARM, top_p=0.75),
    "min_p": replace(WARM, min_p=0.2),
    "all": replace(WARM, top_k=40, top_p=0.8, min_p=0.02),
}


def drawn(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> list[int]:
    """A token of each row, as the parameters' documentation reads: filters one after the other, then one draw."""
    tokens = []
    for row in logits:
        weights = torch.softmax(row.double() / params.temperature, dim=0)
        weights[weights < params.min_p * weights.max()] = 0
        if params.top_k:
            weights[weights < weights.topk(params.top_k).values[-1]] = 0
        order = weights.argsort(descending=True)
        before = weights[order].cumsum(0) - weights[order]
        weights[order[before >= params.top_p * weights.sum()]] = 0
        tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
    return tokens


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the reference is made to say: of random rows, drawn anew each run."""
    seed = random.SystemRandom().randrange(1 << 31)
    print("seed", seed)
    rows = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    monkeypatch.setattr(checks, "reference_logits", lambda *_, **__: rows)
    return rows


def verdict(output: list[int], params: SamplingParams) -> checks.Drawn:
    return verify_sampled(None, None, [([1, 2, 3], output)], params, 0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WAYS)
def test_tokens_drawn_by_their_weights_pass(name: str, logits: Tensor) -> None:
    output = drawn(logits, WAYS[name], torch.Generator().manual_seed(5))
    found = verdict(output, WAYS[name])
    assert found.passed, found
    assert (found.positions, found.outside) == (TOKENS, 0)


@pytest.mark.parametrize("name", WAYS)
def test_greedy_tokens_and_another_temperature_do_not_pass(name: str, logits: Tensor) -> None:
    assert not verdict(logits.argmax(dim=1).tolist(), WAYS[name]).passed
    hot = replace(WARM, temperature=1.6)
    assert not verdict(drawn(logits, hot, torch.Generator().manual_seed(6)), WAYS[name]).passed


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "all"])
def test_a_filter_left_out_is_counted_token_by_token(name: str, logits: Tensor) -> None:
    output = drawn(logits, WARM, torch.Generator().manual_seed(7))
    found = verdict(output, WAYS[name])
    assert found.outside > TOKENS // 50, found


def test_penalties_and_bias_left_out_are_seen(logits: Tensor) -> None:
    plain = drawn(logits, WARM, torch.Generator().manual_seed(8))
    biased = replace(WARM, logit_bias=((plain[0], 9.0),))
    assert not verdict(plain, biased).passed
    # All that was ever drawn weighs next to nothing from then on.
    assert not verdict(plain[:1] * TOKENS, replace(WARM, frequency_penalty=2.0)).passed


def test_a_draw_is_as_surprising_as_the_entropy_of_what_is_left() -> None:
    """Two tokens, three to one: by hand."""
    rows = torch.tensor([[math.log(3.0), 0.0, -50.0]]).repeat(2, 1)
    surprise, variance = checks.surprises(rows, torch.tensor([0, 1]), SamplingParams(temperature=1.0, top_k=2))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert surprise.tolist() == pytest.approx([math.log(0.75) + entropy, math.log(0.25) + entropy])
    expected = 0.75 * math.log(0.75) ** 2 + 0.25 * math.log(0.25) ** 2 - entropy**2
    assert variance.tolist() == pytest.approx([expected] * 2)


def test_every_way_is_measured_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    sizes = ["--device", "cpu", "--input-len", "9", "--output-len", "12", "--max-model-len", "64"]
    assert mode.main(["--shape", "tiny", "--n", "1,3", *sizes, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    names = [way.name for way in mode.ways(256)]
    assert [(row["n"], row["way"]) for row in rows] == [(n, name) for n in (1, 3) for name in names]
    assert all(row["passed"] and row["verdict"]["positions"] == 12 * row["n"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) > len(rows)


def test_an_engine_that_samples_otherwise_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--device", "cpu", "--input-len", "9", "--output-len", "32", "--max-model-len", "64"]
    lying = [mode.Way("greedy", GREEDY), mode.Way("hot", SamplingParams(temperature=0.7, ignore_eos=True))]
    monkeypatch.setattr(mode, "ways", lambda vocab: lying)
    asked = mode.run_round

    def greedily(loop: object, work: object, vocab: int, seed: int, params: SamplingParams) -> object:
        return asked(loop, work, vocab, seed, GREEDY)  # type: ignore[arg-type]

    monkeypatch.setattr(mode, "run_round", greedily)
    assert mode.main(["--shape", "tiny", "--n", "3", *sizes]) == 1


@pytest.mark.parametrize("flag", [["--top-p", "0.5"], ["--structured"], ["--uniform", "3-9"]])
def test_what_it_does_not_measure_is_refused_by_name(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert mode.main(["--shape", "tiny", *flag]) == 2
    assert flag[0] in capsys.readouterr().err
