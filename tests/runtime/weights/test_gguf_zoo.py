"""Every architecture that is read from GGUF, against transformers on the checkpoint that the file was made of."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.models.test_zoo import ROWS, SEED, greedy_tokens, save_random
from tests.runtime.weights import gguf_zoo

# DeepSeek's two factors are one in files.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.8,
    "mscale_all_dim": 0.8,
}  # fmt: skip

# The file's architecture, the row of the table's test, and what of its sizes no file can say.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("llama", "MixtralForCausalLM", {}),
    "qwen2moe": (
        "qwen2moe", "Qwen2MoeForCausalLM",
        {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
    "qwen3moe": ("qwen3moe", "Qwen3MoeForCausalLM", {"mlp_only_layers": []}),
    "qwen2vl": ("qwen2vl", "Qwen2_5_VLForConditionalGeneration", {}),
    "qwen3vl": ("qwen3vl", "Qwen3VLForConditionalGeneration", {}),
    "phi2": ("phi2", "PhiForCausalLM", {}),
    "phi3": ("phi3", "Phi3ForCausalLM", {}),
    "phi3-long": ("phi3", "Phi3ForCausalLM-long", {"sliding_window": 21}),
    "phimoe": ("phimoe", "PhimoeForCausalLM", {"router_jitter_noise": 0.01}),
    "gptneox": ("gptneox", "GPTNeoXForCausalLM", {}),
    "gptneox-serial": ("gptneox", "GPTNeoXForCausalLM-serial", {}),
    "stablelm": ("stablelm", "StableLmForCausalLM", {}),
    "stablelm-parallel": ("stablelm", "StableLmForCausalLM-parallel", {}),
    "command-r": ("command-r", "CohereForCausalLM", {"tie_word_embeddings": True}),
    "command-r-qk-norm": ("command-r", "CohereForCausalLM-qk-norm", {"tie_word_embeddings": True}),
    "cohere2": ("cohere2", "Cohere2ForCausalLM", {"tie_word_embeddings": True}),
    "chatglm": ("chatglm", "GlmForCausalLM", {}),
    "glm4": ("glm4", "Glm4ForCausalLM", {}),
    "glm4moe": ("glm4moe", "Glm4MoeForCausalLM", {}),
    "glm4moe-one-group": ("glm4moe", "Glm4MoeForCausalLM-one-group", {}),
    "nemotron": ("nemotron", "NemotronForCausalLM", {}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "gpt-oss": ("gpt-oss", "GptOssForCausalLM", {"swiglu_limit": 7.0}),
    "deepseek2": ("deepseek2", "DeepseekV2ForCausalLM", {"rope_parameters": YARN}),
    "deepseek2-lite": ("deepseek2", "DeepseekV2ForCausalLM-lite", {}),
    "deepseek2-sigmoid": ("deepseek2", "DeepseekV3ForCausalLM", {"rope_parameters": YARN}),
    "minicpm3": ("minicpm3", "MiniCPM3ForCausalLM", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}),
    "minicpm": ("minicpm", "MiniCPMForCausalLM", {}),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", {}),
    "olmo3": ("olmo2", "Olmo3ForCausalLM", {}),
    "olmoe": ("olmoe", "OlmoeForCausalLM", {}),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM", {}),
    "granitemoe-shared": ("granitemoe", "GraniteMoeSharedForCausalLM", {}),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", {"sliding_window": 4096}),
    "internlm2": ("internlm2", "InternLM2ForCausalLM", {}),
    "exaone": ("exaone", "ExaoneForCausalLM", {}),
    "exaone4": ("exaone4", "Exaone4ForCausalLM", {}),
    "exaone4-whole": ("exaone4", "Exaone4ForCausalLM-whole", {}),
    "baichuan": ("baichuan", "BaichuanForCausalLM", {}),
    "arcee": ("arcee", "ArceeForCausalLM", {}),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM", {}),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_of_a_file_equal_transformers(name: str, tmp_path: Path, paged_model: Any) -> None:
    print(f"seed {SEED}")
    architecture, row, changes = CASES[name]
    theirs, limit = save_random(row, tmp_path, **changes), ROWS[row].limit
    ours = paged_model(str(gguf_zoo.write(tmp_path, tmp_path / "m.gguf", architecture)), slots=2)
    rng = random.Random(SEED)
    prompts = [[rng.randrange(3, ours.spec.vocab) for _ in range(count)] for count in (41, 35)]
    with torch.no_grad():
        expected = [theirs(torch.tensor([prompt])).logits[0] for prompt in prompts]
    for got, wanted in zip(ours.step(list(enumerate(prompts)), all_logits=True), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=limit, rtol=limit)
    ours.forget()
    assert ours.greedy(prompts[:1], 64)[0] == greedy_tokens(theirs, prompts[0], 64)
