"""PEFT folders with random adapters, made by PEFT itself, and the merged models that they stand for.

Invariants: both matrices are random, so that an adapter changes every token; what is saved is what PEFT saves.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT asks transformers for what it gives up, and must not ask a hub for anything."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def load_base(checkpoint: Path) -> Any:
    """The base model as transformers loads it, fp32."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    )
    model.config._experts_implementation = "eager"  # of any sizes
    return model.eval()


def make_adapter(checkpoint: Path, folder: Path, seed: int, **settings: Any) -> Path:
    """An adapter of the model in `checkpoint`, saved to `folder`; `settings` are LoraConfig's."""
    with quiet():
        import peft

        config = peft.LoraConfig(**{"target_modules": list(SEVEN), **settings})
        model = peft.get_peft_model(load_base(checkpoint), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
        model.save_pretrained(str(folder))
    return folder


def adapted(checkpoint: Path, folder: Path) -> Any:
    """The base model beside the adapter in `folder`, as PEFT runs them."""
    with quiet():
        import peft

        return peft.PeftModel.from_pretrained(load_base(checkpoint), folder).eval()


def merged(checkpoint: Path, folder: Path) -> Any:
    """The base model with the adapter in `folder` merged into its weights by PEFT."""
    with quiet():
        return adapted(checkpoint, folder).merge_and_unload().eval()


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """The likeliest continuation, by transformers, without a cache and without an end."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]
