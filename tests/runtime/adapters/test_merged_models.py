"""Rows with adapters give the tokens of PEFT's merged models, each row those of its own, mixed in one batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.adapters.peft_folders import adapted, greedy, load_base, make_adapter, merged
from tests.runtime.drafts.random_pace import decide_by_chance

from stoker_runtime import LLM, LoRARequest, SamplingParams, request

SIZES: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 128, "page_size": 16, "max_num_seqs": 6,
    "max_num_batched_tokens": 40, "num_gpu_blocks": 40, "enable_lora": True, "max_loras": 3, "max_lora_rank": 256,
    "generation_config": "none",
}  # fmt: skip
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# What each adapter of a model is, in PEFT's words.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 7},
    "widest": {"r": 256, "lora_alpha": 100},
    "rank one": {"r": 1, "lora_alpha": 3, "target_modules": "all-linear"},
    "stabilized": {"r": 19, "lora_alpha": 5, "use_rslora": True},
    "patterns": {
        "r": 6, "lora_alpha": 4, "target_modules": r".*\.[12]\.(self_attn\.[qv]_proj|mlp\.\w+_proj)",
        "rank_pattern": {"up_proj": 11, r"layers\.2\.self_attn\.q_proj": 3}, "alpha_pattern": {"down_proj": 9},
    },
    "some layers": {"r": 5, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 2]},
}  # fmt: skip
PROMPT = [5, 17, 99, 23, 64, 3, 41]
LONG = [(29 * at + at * at) % 113 + 3 for at in range(40)]
"""Longer than two pages, which a prefix is shared by."""


def run(llm: LLM, prompts: list[list[int]], loras: list[LoRARequest | None], tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, lora_request=loras)
    llm.engine.scheduler.check()
    llm.engine.adapters.check()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in ("llama", "qwen2-yarn", "qwen3")),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("llama", "qwen3")),
    ],
)
def test_each_row_gives_the_tokens_of_its_merged_model(
    name: str, device: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of mixed ranks, and one without an adapter; on a GPU within graphs."""
    sizes = SIZES | {"device": device}
    base = tiny_checkpoint(name)
    kinds = dict(list(KINDS.items())[:: 1 if name == "llama" else 2])
    loras: list[LoRARequest | None] = [None]
    expected = [greedy(load_base(base), PROMPT, 12)]
    for number, (kind, settings) in enumerate(kinds.items(), 1):
        folder = make_adapter(base, tmp_path / kind, number, **settings)
        loras.append(LoRARequest(kind, number, str(folder)))
        expected.append(greedy(merged(base, folder), PROMPT, 12))
    assert len(set(map(tuple, expected))) == len(expected), "adapters have to be told apart by their tokens"
    with LLM(str(base), **sizes) as llm:
        # Every prompt twice and in turns: more adapters than slots.
        got = run(llm, [PROMPT] * 2 * len(loras), loras * 2, 12)
    assert got == expected * 2
    with LLM(str(base), **sizes, speculative_config={"method": "suffix", "num_speculative_tokens": 4}) as llm:
        decide_by_chance(llm.engine, random.Random(name))
        assert run(llm, [PROMPT] * 2 * len(loras), loras * 2, 12) == expected * 2
        assert llm.engine.stats().drafts


def test_prefixes_and_sessions_are_those_of_an_adapter(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_checkpoint("llama")
    folders = [make_adapter(base, tmp_path / str(rank), rank, r=rank) for rank in (3, 10)]
    loras: list[LoRARequest | None] = [None, *(LoRARequest(each.name, int(each.name), str(each)) for each in folders)]
    models = [load_base(base), *(merged(base, each) for each in folders)]
    expected = [greedy(model, LONG, 6) for model in models]
    assert len(set(map(tuple, expected))) == 3
    with LLM(str(base), **SIZES) as llm:
        for lora, tokens in zip(loras, expected, strict=True):
            before = llm.engine.stats().prefix_hits
            assert run(llm, [LONG], [lora], 6) == [tokens]
            assert llm.engine.stats().prefix_hits == before, "what another model computed"
            assert run(llm, [LONG], [lora], 6) == [tokens]
            assert llm.engine.stats().prefix_hits == before + 32
        params = request.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        for lora, tokens in zip(loras, expected, strict=True):
            number = llm.engine.adapters.served[lora.lora_name].number if lora else 0
            prompt, turns = tuple(LONG), list[list[int]]()
            for _ in range(2):
                sequence = llm.engine.add(request.Request("turn", prompt, params, adapter=number, session="mine"))
                while llm.engine.has_work:
                    llm.engine.step()
                turns.append(sequence.tokens[sequence.prompt_length :].tolist())
                prompt = (*sequence.tokens.tolist(), 8)
            assert turns[0] == tokens
            assert turns[1] == greedy(models[loras.index(lora)], [*LONG, *tokens, 8], 6)


@pytest.mark.parametrize("kind", ["widest", "plain"])
def test_drafts_are_accepted_beside_an_adapter(
    kind: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_checkpoint("llama")
    folder = make_adapter(base, tmp_path / "one", 2, **KINDS[kind])
    model, rng = merged(base, folder), random.Random(kind)
    prompts = [[rng.randrange(3, 120)] * 9 for _ in range(8)]
    expected = [greedy(model, each, 40) for each in prompts]
    with LLM(str(base), **SIZES, speculative_config={"method": "suffix", "num_speculative_tokens": 4}) as llm:
        decide_by_chance(llm.engine, rng)
        assert run(llm, prompts, [LoRARequest("one", 4, str(folder))] * 8, 40) == expected
        assert llm.engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_embedding_and_the_head_are_adapted(
    name: str, device: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_checkpoint(name)
    targets = ["embed_tokens", "q_proj"] + (["lm_head"] if name == "llama" else [])
    folder = make_adapter(base, tmp_path / "ends", 3, r=6, lora_alpha=6, target_modules=targets)
    lora = LoRARequest("ends", 9, str(folder))
    # Not merged: a tied head would take what is added to the embedding, and PEFT's model keeps them apart.
    model = adapted(base, folder)
    expected = [greedy(model, PROMPT, 10), greedy(load_base(base), PROMPT, 10)]
    with LLM(str(base), **SIZES | {"device": device}, lora_embeddings=True) as llm:
        assert run(llm, [PROMPT, PROMPT], [lora, None], 10) == expected
        scored = llm.generate(
            [{"prompt_token_ids": PROMPT}],
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
            lora_request=lora,
        )[0]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    told = scored.prompt_logprobs
    assert told is not None
    for at, token in enumerate(PROMPT[1:]):
        entry = told[at + 1]
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(logits[at, token]), abs=2e-4)
