"""A quantized checkpoint beside a dense one of the values that it stands for: how tests write them and compare them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def random_qwen3(folder: Path, shape: dict[str, Any], seed: int) -> Path:
    """`folder` with a random Qwen3 of `shape` in fp32, norms near one."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 0.1 * noise)
    model.save_pretrained(folder)
    return folder


def save_both(
    folder: Path, settings: dict[str, Any], packed: dict[str, Tensor], config: dict[str, Any], plain: dict[str, Tensor]
) -> tuple[Path, Path]:
    """`packed` with its quantization's `config` in `folder/q`, and `plain` in `folder/d`; `settings` are of both."""
    for name, tensors, more in (("q", packed, {"quantization_config": config}), ("d", plain, {})):
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(settings | more))
    return folder / "q", folder / "d"


def assert_likeliest(plain: Path, prompts: list[list[int]], found: list[list[int]]) -> None:
    """Each of the tokens found is the one that transformers finds likeliest on `plain`, behind those before it."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(plain)
    for prompt, tokens in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()


def assert_equals_transformers(quantized: Path, plain: Path, method: str, seed: str, paged_model: Any) -> None:
    """Logits and 64 greedy tokens of `quantized` are those of transformers on `plain`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(plain)
    model.generation_config.eos_token_id = None
    ids = random.Random(seed).choices(range(3, 104), k=41)
    ours = paged_model(str(quantized), quantization=method, max_len=128)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours.step([(0, ids)], all_logits=True)[0], expected, atol=3e-4, rtol=3e-4)
    ours.forget()
    prompts = [ids[:9], ids[20:]]
    for prompt, tokens in zip(prompts, ours.greedy(prompts, 64), strict=True):
        exact = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
        assert tokens == exact[0, len(prompt) :].tolist()
