"""What a check of greedy tokens allows: roundings, of routers too, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.runtime.models.test_zoo import SEED, save_random

from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.bench.verify import TOLERANCE_BF16, TOLERANCE_FP8, Tolerance, verify_greedy
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.load import load_weights

STRICT = Tolerance(1e-6, 1e-6)
LENGTH = 24


def loaded(name: str, folder: Path, dtype: torch.dtype) -> tuple[ModelSpec, DecoderWeights]:
    print(f"seed {SEED}")
    save_random(name, folder)
    spec = build_spec(read_source(str(folder)))
    return spec, load_weights(str(folder), spec, torch.device("cpu"), dtype)


def greedy(spec: ModelSpec, weights: DecoderWeights, prompt: list[int], rounded: torch.dtype) -> list[int]:
    """The best token after each one before, with the stream rounded to `rounded`."""
    output: list[int] = []
    for _ in range(LENGTH):
        ids = [*prompt, *output]
        output.append(int(reference_logits(spec, weights, ids, len(ids) - 1, rounded=rounded).argmax()))
    return output


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_a_mixture_may_lose_what_rounding_loses(name: str, tmp_path: Path) -> None:
    spec, weights = loaded(name, tmp_path, torch.bfloat16)
    rng = random.Random(SEED)
    sequences = []
    for _ in range(3):
        prompt = [rng.randrange(3, 90) for _ in range(20)]
        sequences.append((prompt, greedy(spec, weights, prompt, torch.bfloat16)))
    verdict = verify_greedy(spec, weights, sequences, STRICT)
    assert verdict.passed
    assert verdict.ties == 0 or verdict.mean > STRICT.mean
    others = [(prompt, [(token + 1) % 90 for token in output]) for prompt, output in sequences]
    lost = verify_greedy(spec, weights, others, STRICT)
    assert not lost.passed
    assert lost.most_mean <= max(TOLERANCE_FP8.mean, TOLERANCE_FP8.one / (3 * LENGTH))


def test_a_dense_model_may_not(tmp_path: Path) -> None:
    spec, weights = loaded("LlamaForCausalLM", tmp_path, torch.bfloat16)
    prompt = list(range(5, 30))
    output = greedy(spec, weights, prompt, torch.float32)
    verdict = verify_greedy(spec, weights, [(prompt, output)], TOLERANCE_BF16)
    assert verdict.passed
    assert verdict.most_mean == max(TOLERANCE_BF16.mean, TOLERANCE_BF16.one / LENGTH)
    assert not verify_greedy(spec, weights, [(prompt, [output[0], *([4] * 9)])], TOLERANCE_BF16).passed
