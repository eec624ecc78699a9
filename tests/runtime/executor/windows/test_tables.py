"""Layers with a window give up pages out of sight, and no token changes: random Gemma-3- and gpt-oss-like models.

Tokens are compared with transformers', and with those of the engine that keeps all pages. Sizes, windows and weights
are drawn anew in every run, from a seed that a failure prints.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_runtime import LLM
from stoker_runtime.executor.executor import Executor
from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.scheduler.sequence import Sequence

SEED = random.SystemRandom().randrange(1 << 30)
PAGE, LONGEST = 16, 512
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": LONGEST, "page_size": PAGE}


def gemma(rng: random.Random) -> Any:
    """Of `period` layers one sees everything, and the last period is not whole."""
    from transformers import Gemma3TextConfig

    period = rng.choice([3, 4])
    return Gemma3TextConfig(
        num_hidden_layers=2 * period + 1, sliding_window_pattern=period, query_pre_attn_scalar=20, **sizes(rng)
    )


def gpt_oss(rng: random.Random) -> Any:
    """Every second layer sees everything; sinks and experts."""
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=4, num_local_experts=5, num_experts_per_tok=2, **sizes(rng))


KINDS = {"gemma": gemma, "gpt-oss": gpt_oss}


def sizes(rng: random.Random) -> dict[str, Any]:
    """A window that no page and no block of keys ends with."""
    return {
        "vocab_size": rng.randrange(90, 140), "hidden_size": 48, "intermediate_size": 40, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": rng.choice([5, 23, 37, 71]),
        "max_position_embeddings": 2 * LONGEST, "rope_parameters": None, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": None,
    }  # fmt: skip


def save_random(kind: str, folder: Path, **changes: Any) -> Any:
    """Save a random model of a kind, and of `changes` to its sizes, into `folder`; returns transformers' own."""
    from transformers import AutoModelForCausalLM

    print(f"seed {SEED}")
    rng = random.Random(f"{SEED}{kind}")
    config = KINDS[kind](rng)
    config.update(changes)
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.3 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A folder with a random model, and transformers' own of it."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    return str(folder), save_random(request.param, folder)


def executor_of(llm: LLM) -> Executor:
    """What runs its steps."""
    executor: Executor = llm.engine.executor
    return executor


def greedy(count: int) -> SamplingParams:
    """So many likeliest tokens."""
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def run(llm: LLM, sequences: list[Sequence], *, poison: bool = False) -> int:
    """To idle; → the most places that a sequence held that decoded. `poison`: pages that nobody holds are NaN."""
    scheduler, most = llm.engine.scheduler, 0
    while llm.engine.has_work:
        llm.engine.step()
        scheduler.check()
        if poison:
            held = {page for each in sequences for page in each.all_pages}
            free = [page for page in range(llm.engine.executor.num_pages) if page not in held]
            with torch.inference_mode():
                executor_of(llm).arena[:, :, free] = torch.nan
        settled = [each for each in scheduler._decoding if each not in scheduler._launched_prefills]
        most = max([most, *(len(each.near) for each in settled)])
    return most


def test_tokens_are_those_of_transformers_and_pages_are_bounded(checkpoint: tuple[str, Any]) -> None:
    """Long prompts in chunks beside decodes, in a pool too small for whole sequences of all layers."""
    folder, theirs = checkpoint
    rng = random.Random(SEED)
    prompts = [[rng.randrange(3, 90) for _ in range(count)] for count in (301, 9, 190)]
    with LLM(folder, **SIZES, max_num_seqs=3, max_num_batched_tokens=70, num_gpu_blocks=140) as llm:
        sight = llm.engine.executor.sight
        assert sight is not None, "nothing is given up"
        running = [llm.engine.add(Request(str(at), tuple(prompt), greedy(60))) for at, prompt in enumerate(prompts)]
        most = run(llm, running)
        # The window, and what reading in blocks takes more.
        assert 0 < most <= -(-(sight.window + 63) // PAGE)
        assert llm.engine.stats().pages_used == 0
    for sequence, prompt in zip(running, prompts, strict=True):
        ours = list(sequence.tokens[len(prompt) :])
        with torch.no_grad():
            logits = theirs(torch.tensor([[*prompt, *ours]])).logits[0, len(prompt) - 1 : -1]
        assert ours == logits.argmax(-1).tolist()


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_crowding_and_keeping_everything_change_no_token(checkpoint: tuple[str, Any], invariant: bool) -> None:
    """Prefix hits, preemption, chunks, penalties, and samples by fixed sums; against an engine that keeps all pages."""
    folder, _ = checkpoint
    rng = random.Random(SEED + 1)
    shared = [rng.randrange(3, 90) for _ in range(260)]
    begun = [0, 33, 150, 240, 260, 260] * 2
    rng.shuffle(begun)
    prompts = [shared[:count] + [rng.randrange(3, 90) for _ in range(rng.randint(1, 40))]
               for count in begun[: 4 if invariant else 12]]  # fmt: skip
    # What is drawn from the same logits but for their rounding is another token once in some thousands.
    params = [
        replace(
            greedy(rng.randint(30, 70)), temperature=rng.choice([0.0, 1.0]) if invariant else 0.0,
            seed=rng.getrandbits(32), presence_penalty=rng.choice([0.0, 0.8]),
        )
        for _ in prompts
    ]  # fmt: skip
    given = {**SIZES, "batch_invariant": invariant}
    with LLM(
        folder, **given, max_num_seqs=2, max_num_batched_tokens=256, disable_hybrid_kv_cache_manager=True
    ) as roomy:
        assert roomy.engine.executor.sight is None
        expected = roomy.generate_tokens(prompts, params)
    with LLM(folder, **given, max_num_seqs=6, max_num_batched_tokens=40, num_gpu_blocks=1) as probe:
        tight = probe.engine.executor.sight.pages(384) + 2
    with LLM(folder, **given, max_num_seqs=6, max_num_batched_tokens=40, num_gpu_blocks=tight) as crowded:
        crowded_tokens = crowded.generate_tokens(prompts, params)
        crowded.engine.scheduler.check()
        stats = crowded.engine.stats()
    assert crowded_tokens == expected
    assert invariant or (stats.preemptions > 0 and stats.prefix_hits > 0)
    assert stats.pages_used == 0


def test_what_lies_in_pages_out_of_sight_changes_nothing(checkpoint: tuple[str, Any]) -> None:
    """Every page that no sequence holds is NaN after each step: given up, or not begun."""
    folder, _ = checkpoint
    prompt = tuple(random.Random(SEED + 2).randrange(3, 90) for _ in range(280))
    tokens = []
    for poison in (False, True):
        with LLM(
            folder, **SIZES, max_num_seqs=2, max_num_batched_tokens=64, num_gpu_blocks=90, enable_prefix_caching=False
        ) as llm:
            # Another one beside it, whose pages are given up while this one reads.
            running = [llm.engine.add(Request(str(at), prompt[at * 150 :], greedy(50))) for at in range(2)]
            run(llm, running, poison=poison)
            tokens.append([list(each.tokens) for each in running])
    assert tokens[0] == tokens[1]
