"""Adapters beside base weights in 8 and 4 bits: what they add is not rounded as the base is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.adapters.peft_folders import load_base, make_adapter, merged

from stoker_runtime import LLM, LoRARequest, SamplingParams

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPT = [5, 17, 99, 23, 64, 3, 41, 77, 8, 120, 61, 15]
SIZES: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 3, "num_gpu_blocks": 16,
    "enable_lora": True, "generation_config": "none",
}  # fmt: skip


def scores(llm: LLM, lora: LoRARequest | None) -> torch.Tensor:
    """Log-probabilities of the prompt's own tokens but the first."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    told = llm.generate([{"prompt_token_ids": PROMPT}], params, lora_request=lora)[0].prompt_logprobs
    assert told is not None
    return torch.tensor([entry[token].logprob for entry, token in zip(told[1:], PROMPT[1:], strict=True) if entry])


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("quantization", ["fp8", "w4"])
def test_an_adapter_moves_a_quantized_base_as_it_moves_the_model(
    quantization: str, device: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    sizes = SIZES | ({"device": device, "dtype": "bfloat16"} if device == "cuda" else {})
    base = tiny_checkpoint("llama")
    lora = LoRARequest("strong", 1, str(make_adapter(base, tmp_path / "strong", 5, r=8, lora_alpha=16)))
    with torch.no_grad():
        logits = merged(base, tmp_path / "strong")(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = logits[range(len(PROMPT) - 1), PROMPT[1:]]
    with LLM(str(base), **sizes, quantization=quantization) as llm:
        adapted, plain = scores(llm, lora), scores(llm, None)
    error, effect = (adapted - expected).abs().mean(), (plain - expected).abs().mean()
    assert error < 0.35 * effect, f"off by {error:.3f}, where the adapter changes {effect:.3f}"


def odds(model: Any, text: list[int]) -> torch.Tensor:
    """Log-probabilities of what follows PROMPT in `text`, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0].log_softmax(-1)
    return logits[range(len(PROMPT) - 1, len(text) - 1), text[len(PROMPT) :]]


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("quantization", ["none", "fp8", "w4"])
def test_what_is_written_in_one_batch_has_the_odds_of_each_rows_own_model(
    quantization: str, device: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of two ranks, and without an adapter; on a GPU within graphs from a shape's second step on."""
    base = tiny_checkpoint("llama")
    folders = [make_adapter(base, tmp_path / f"rank {rank}", rank, r=rank, lora_alpha=2 * rank) for rank in (11, 3)]
    loras: list[LoRARequest | None] = [LoRARequest(each.name, at, str(each)) for at, each in enumerate(folders, 1)]
    models, plain = [*(merged(base, each) for each in folders), load_base(base)], load_base(base)
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False)
    sizes = SIZES | ({"device": device, "dtype": "bfloat16"} if device == "cuda" else {})
    with LLM(str(base), **sizes, quantization=quantization) as llm:
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 3, params, lora_request=[*loras, None])
        executor: Any = llm.engine.executor
        assert any(shape.adapters for shape in executor.graphs._graphs) == (device == "cuda")
    errors, effects = [], []
    for output, model in zip(outputs, models, strict=True):
        [found] = output.outputs
        ids, told = list(found.token_ids), found.logprobs
        assert told is not None
        said = torch.tensor([entry[token].logprob for entry, token in zip(told, ids, strict=True)])
        expected = odds(model, [*PROMPT, *ids])
        errors.append(float((said - expected).abs().mean()))
        effects.append(float((odds(plain, [*PROMPT, *ids]) - expected).abs().mean()))
    effect = min(effects[:2])
    most = 0.35 * effect if quantization != "none" else 0.05 * effect if device == "cuda" else 1e-3
    assert max(errors) < most, f"off by {errors}, where adapters change {effects}"
