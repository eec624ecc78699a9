"""Drafts of every kind beside plain decoding, in graphs on a GPU: no answer differs where bits depend on no batch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.executor.eagle_heads import quiet, save_head
from tests.runtime.executor.test_next_token_heads import save_model
from tests.runtime.executor.test_speculation import METHODS, check_distribution, requests, serve, smaller
from tests.runtime.executor.texts_apart import check_apart
from transformers import LlamaConfig, LlamaForCausalLM

from stoker_kernels.launch import dispatch
from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import EngineStats, Request, SamplingParams

MTP = {"method": "mtp", "num_speculative_tokens": 3}
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UNIT = 64
"""Divides the sizes that batch-invariant products on a GPU sum over."""


@pytest.fixture(autouse=True)
def usual_again() -> Iterator[None]:
    yield
    dispatch.demand_invariance(False)


def llama(folder: Path, seed: int, vocab: int = 168, spread: float = 0.9) -> str:
    """A model in which the last token says most of the next, the more the larger `spread` is."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=2 * UNIT, intermediate_size=5 * UNIT, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=UNIT, vocab_size=vocab, max_position_embeddings=512, initializer_range=0.15,
        tie_word_embeddings=False,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    torch.nn.init.normal_(target.model.embed_tokens.weight, std=spread)
    target.save_pretrained(folder)
    return quiet(str(folder))


def mixture(folder: Path, kind: str, seed: int) -> str:
    """A mixture with its own layer for the token after the next."""
    sizes = {
        "hidden_size": 2 * UNIT, "intermediate_size": 3 * UNIT, "moe_intermediate_size": UNIT, "vocab_size": 56,
        "n_routed_experts": 8, "n_group": 4, "max_position_embeddings": 512,
        "initializer_range": 0.1,
    }  # fmt: skip
    sizes |= {"head_dim": UNIT} if kind == "Glm4Moe" else {}
    model = quiet(save_model(folder, kind, seed, apt=True, **sizes)[0])
    file = Path(model) / "model.safetensors"
    # Layers add to an embedding that outweighs them, as to the head's, which is normed.
    save_file({name: each * (10 if "embed_tokens" in name else 1) for name, each in load_file(file).items()}, file)
    return model


def drafted_by(method: str, folder: Path, seed: int) -> tuple[str, dict[str, Any]]:
    """A model, and what drafts for it."""
    if method == "mtp":
        return mixture(folder, "Glm4Moe", seed), MTP
    model = llama(folder, seed)
    if method == "eagle3":
        return model, METHODS[method] | {"model": save_head(model, seed, unit=UNIT)}
    return model, METHODS[method] | ({"model": smaller(model, 0.05)} if method == "draft_model" else {})


def build(model: str, drafts: dict[str, Any] | None, **sizes: Any) -> Executor:
    given = {"dtype": "bfloat16", "max_model_len": 128, "page_size": 16, "cpu_threads": 1, **sizes}
    return build_executor(EngineConfig(model=model, speculative_config=json.dumps(drafts) if drafts else "", **given))


@pytest.mark.matrix(take=3)
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(
    ("method", "seed"), [("ngram", 61), ("suffix", 62), ("draft_model", 63), ("eagle3", 64), ("mtp", 65)]
)
def test_no_answer_differs(method: str, seed: int, device: str, tmp_path: Path) -> None:
    """Greedy and seeded, with every parameter: crowded with drafts, in another order, one to nine in a step."""
    model, drafts = drafted_by(method, tmp_path, seed)
    sizes: dict[str, Any] = {"device": device, "batch_invariant": True}
    sizes |= {"dtype": "float32"} if device == "cpu" else {}
    plain = build(model, None, **sizes, max_num_seqs=5, max_num_batched_tokens=64, num_gpu_blocks=60)
    asked = requests(random.Random(seed), plain.vocab_size, 90 if device == "cuda" else 40)
    expected, _ = serve(plain, asked, seed)
    plain.close()
    drafting = build(model, drafts, **sizes, max_num_seqs=9, max_num_batched_tokens=41, num_gpu_blocks=24)
    got, stats = serve(drafting, asked, seed + 1, scheduling_policy="priority")
    for request in asked:
        mine, theirs = got[request.id], expected[request.id]
        assert (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish), request
        # Log-probabilities are those of the same logits, to the bit.
        assert mine.logprobs == theirs.logprobs, request
    check_drafts(drafting, stats)
    assert stats.preemptions > 0, "the device was meant to be crowded"
    drafting.close()


@pytest.mark.matrix
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(("kind", "seed"), [("DeepseekV3", 71), ("Glm4Moe", 72)])
def test_own_heads_with_the_usual_kernels(kind: str, seed: int, device: str, tmp_path: Path) -> None:
    """In fp32, where a router's choice is seldom a matter of rounding; on a GPU now and then it is."""
    model, rng = mixture(tmp_path, kind, seed), random.Random(seed)
    params = [
        SamplingParams(max_tokens=45, temperature=temperature, seed=rng.getrandbits(40), ignore_eos=True)
        for temperature in (0.0, 0.0, 0.7) * 8
    ]
    prompts = [tuple(rng.randrange(56) for _ in range(rng.randint(2, 70))) for _ in params]
    asked = [Request(str(at), *each) for at, each in enumerate(zip(prompts, params, strict=True))]
    sizes: dict[str, Any] = {"device": device, "dtype": "float32", "num_gpu_blocks": 70}
    texts = []
    for drafts, wide in ((None, 4), (MTP, 9)):
        executor = build(model, drafts, **sizes, max_num_seqs=wide, max_num_batched_tokens=100)
        answers, stats = serve(executor, asked, seed + wide)
        texts.append([answers[each.id].tokens for each in asked])
        if drafts:
            check_drafts(executor, stats)
            check_apart(executor, asked, *texts)
        executor.close()
    same = [a == b for a, b in zip(*texts, strict=True)]
    assert all(same) if device == "cpu" else sum(same) > len(same) / 2


@pytest.mark.matrix(take=1)
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(("method", "temperature", "top_p"), [("suffix", 0.9, 1.0), ("draft_model", 1.2, 0.85)])
def test_sampled_texts_are_distributed_as_the_model_says(
    method: str, temperature: float, top_p: float, device: str, tmp_path: Path
) -> None:
    seed = 81
    model = llama(tmp_path, seed, 4, spread=0.15)
    drafts = METHODS[method] | ({"model": smaller(model, 0.05)} if method == "draft_model" else {})
    oracle = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    sizes: dict[str, Any] = {"device": device, "dtype": "float32", "num_gpu_blocks": 48}
    executor = build(model, drafts, **sizes, max_num_seqs=24, max_num_batched_tokens=120)
    check_distribution(executor, oracle, seed, temperature, top_p)
    executor.close()


def check_drafts(executor: Executor, stats: EngineStats) -> None:
    """Drafts were accepted, not all of them, and on a GPU within graphs."""
    assert stats.draft_tokens > stats.accepted_tokens > max(stats.draft_tokens / 30, 5)
    if executor.device.type == "cuda":
        assert any(shape.drafts for shape in executor.graphs._graphs)
