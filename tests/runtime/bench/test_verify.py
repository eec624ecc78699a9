"""What a check of greedy tokens allows: roundings, of routers too, and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.runtime.models.test_zoo import ROWS, SEED, Row, save_random

from stoker_runtime.bench import verify
from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.bench.reference.rounding import ROUTER_NOISE, Rounding
from stoker_runtime.bench.verify import TOLERANCE_BF16, TOLERANCE_FP8, Tolerance, Verdict, verify_greedy
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights, LayerWeights
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.load import load_weights

STRICT = Tolerance(1e-6, 1e-6)
LENGTH = 24


def loaded(name: str, folder: Path, dtype: torch.dtype) -> tuple[ModelSpec, DecoderWeights]:
    print(f"seed {SEED}")
    save_random(name, folder)
    spec = build_spec(read_source(str(folder)))
    return spec, load_weights(str(folder), spec, torch.device("cpu"), dtype)


def greedy(spec: ModelSpec, weights: DecoderWeights, prompt: list[int], rounded: torch.dtype | Rounding) -> list[int]:
    """The best token after each one before, with the stream rounded to `rounded`."""
    rounding = rounded if isinstance(rounded, Rounding) else Rounding(rounded)
    output: list[int] = []
    for _ in range(LENGTH):
        ids = [*prompt, *output]
        output.append(int(reference_logits(spec, weights, ids, len(ids) - 1, rounding=rounding).argmax()))
    return output


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_a_mixture_may_lose_what_rounding_loses(name: str, tmp_path: Path) -> None:
    spec, weights = loaded(name, tmp_path, torch.bfloat16)
    rng = random.Random(SEED)
    sequences = []
    while len(sequences) < 3:
        prompt = [rng.randrange(3, 90) for _ in range(20)]
        output = greedy(spec, weights, prompt, torch.bfloat16)
        # Sums over more rows may differ in their last bit, by which a router chooses now and then.
        ids = [*prompt, *output[:-1]]
        whole = reference_logits(spec, weights, ids, len(prompt) - 1, rounding=Rounding(torch.bfloat16))
        if whole.argmax(1).tolist() == output:
            sequences.append((prompt, output))
    verdict = verify_greedy(spec, weights, sequences, STRICT)
    assert verdict.passed
    assert verdict.ties == 0 or verdict.mean > STRICT.mean
    others = [(prompt, [(token + 1) % 90 for token in output]) for prompt, output in sequences]
    lost = verify_greedy(spec, weights, others, STRICT)
    assert not lost.passed
    assert lost.most_mean <= max(TOLERANCE_FP8.mean, TOLERANCE_FP8.one / (3 * LENGTH))


NARROW = Tolerance(0.05, 0.05)
"""A sixtieth of what the second token of a random model lies behind the first at times."""


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "PhimoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_token_of_another_expert_of_equal_weight_is_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine loses whose routers round by draws of its own is found to be rounding, far beyond what is allowed;
    what one loses that takes the wrong experts is not.
    """
    spec, weights = loaded(name, tmp_path, torch.float32)
    rng = random.Random(SEED)

    def checked(output: list[int], runs: int) -> Verdict:
        monkeypatch.setattr(verify, "OTHER_CHOICES", runs)
        return verify_greedy(spec, weights, [(prompt, output)], NARROW)

    monkeypatch.setattr(verify, "ROUNDINGS", 0.0)
    turned = replace(weights, layers=[_of_other_experts(layer) for layer in weights.layers])
    lost, left, wrong, wrong_left = 0.0, 0.0, 0.0, 0.0
    for _ in range(40):
        prompt = [rng.randrange(3, 90) for _ in range(20)]
        output = greedy(spec, weights, prompt, Rounding(noise=ROUTER_NOISE, seed=rng.randrange(2**16, 2**31)))
        strict = checked(output, 0)
        if strict.passed:
            continue
        # Rare pairs of roundings are among many runs, not among the few that a benchmark tries.
        lost, left = lost + strict.mean, left + checked(output, 200).mean
        others = greedy(spec, turned, prompt, torch.float32)
        wrong, wrong_left = wrong + checked(others, 0).mean, wrong_left + checked(others, 24).mean
        assert not checked(others, 24).passed
        if lost > 16 * NARROW.mean:
            break
    assert lost > 0, "no draw changed a token"
    assert left < lost / 3
    assert wrong_left > wrong / 2


def _of_other_experts(layer: LayerWeights) -> LayerWeights:
    """Each router's weights given to the next expert."""
    if layer.mixture is None:
        return layer
    router = replace(layer.mixture.router, data=layer.mixture.router.data.roll(1, 0))
    return replace(layer, mixture=replace(layer.mixture, router=router))


@pytest.mark.parametrize("hidden", [576, 3584, 5120, 8192])
@pytest.mark.parametrize("layers", [1, 28, 40, 63, 112])
def test_a_deeper_or_wider_model_may_lose_more_and_no_wrong_one_passes(layers: int, hidden: int) -> None:
    """Bounds grow with the root of the layers and with the width, far less than what a wrong kernel loses at every
    position: five times the spread of the logits, which grows with the root of the width.
    """
    allowed = TOLERANCE_BF16.of(layers, hidden)
    assert allowed.one == pytest.approx(0.4 * max(1.0, layers / 28) ** 0.5 * max(1.0, hidden / 3584))
    assert allowed.mean == pytest.approx(allowed.one / 8)
    assert allowed.one < 5 / 4 * 1.2 * (max(hidden, 3584) / 3584) ** 0.5
    assert Tolerance(0.3, 0.1).of(layers, hidden) == Tolerance(0.3, 0.1), "what somebody asked for is what counts"


def test_a_deep_model_s_wrong_engine_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 90 layers: what rounding costs is near the bounds at most, layers in another order are far beyond them."""
    row = ROWS["LlamaForCausalLM"]
    deep = Row(row.config, lambda rng: row.changes(rng) | {"num_hidden_layers": 90}, row.published, row.settings)
    monkeypatch.setitem(ROWS, "LlamaForCausalLM", deep)
    spec, weights = loaded("LlamaForCausalLM", tmp_path, torch.bfloat16)
    assert spec.num_layers == 90
    backwards = replace(weights, layers=weights.layers[::-1])
    for prompt in (list(range(5, 30)), list(range(29, 4, -1))):
        right = greedy(spec, weights, prompt, torch.bfloat16)
        verdict = verify_greedy(spec, weights, [(prompt, right)], TOLERANCE_BF16)
        # Weights as small and random as these lose more by rounding now and then.
        assert verdict.mean < 2 * verdict.most_mean
        wrong = greedy(spec, backwards, prompt, torch.bfloat16)
        assert wrong != right
        verdict = verify_greedy(spec, weights, [(prompt, wrong)], TOLERANCE_BF16)
        assert not verdict.passed
        assert verdict.mean > 10 * verdict.most_mean


def test_a_dense_model_may_not(tmp_path: Path) -> None:
    spec, weights = loaded("LlamaForCausalLM", tmp_path, torch.bfloat16)
    prompt = list(range(5, 30))
    output = greedy(spec, weights, prompt, torch.float32)
    verdict = verify_greedy(spec, weights, [(prompt, output)], TOLERANCE_BF16)
    assert verdict.passed
    assert verdict.most_mean == max(TOLERANCE_BF16.mean, TOLERANCE_BF16.one / LENGTH), "of three layers"
    assert not verify_greedy(spec, weights, [(prompt, [output[0], *([4] * 9)])], TOLERANCE_BF16).passed


def test_what_rounding_loses_widens_the_bounds_twofold_at_most(tmp_path: Path) -> None:
    spec, weights = loaded("LlamaForCausalLM", tmp_path, torch.bfloat16)
    weights = replace(weights, embed=weights.embed.to(torch.float8_e4m3fn))  # what the stream is rounded to
    for begin in range(5, 40):  # until that changes a token
        prompt = list(range(begin, begin + 25))
        exact = [(prompt, greedy(spec, weights, prompt, torch.float32))]
        ids = [*prompt, *exact[0][1][:-1]]
        eight = Rounding(torch.float8_e4m3fn)
        if reference_logits(spec, weights, ids, 24, rounding=eight).argmax(1).tolist() != exact[0][1]:
            break
    else:
        pytest.fail("rounding to eight bits changes nothing")
    for rounding, growth in ((1e-9, 1.0), (1e9, 2.0)):
        verdict = verify_greedy(spec, weights, exact, Tolerance(0.024, 0.05, rounding=rounding))
        assert verdict.most_mean == pytest.approx(0.05 * growth)
