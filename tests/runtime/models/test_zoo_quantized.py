"""Every architecture of the table from the quantized checkpoints that are published of such models: AWQ, GPTQ, integers
of compressed-tensors and NVFP4, in the architecture's own names and layout; FP8 is in test_zoo_fp8.py.

What is rounded stands row by row, so a file of rounded rows is the file of the model whose rows were rounded: what
transformers saves of its model on the rounded values has to be what the codes mean, and its logits and 64 tokens ours.
Sizes are whole groups; weights are drawn anew in every run.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.models.greedy import assert_greedy
from tests.runtime.models.hybrid_rows import HYBRIDS
from tests.runtime.models.plain_models import PLAIN
from tests.runtime.models.test_zoo import ROWS, SEED, save_random
from tests.runtime.weights.both_ways import save_both
from tests.runtime.weights.integer_forms import (
    AWQ_CONFIG,
    Quantized,
    awq,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
)
from tests.runtime.weights.test_fp4_checkpoint import modelopt_config, nvfp4
from tests.runtime.weights.test_integer_experts import load
from torch import Tensor, nn

from stoker_runtime.bench.reference.mixture import expert_values
from stoker_runtime.bench.reference.weights import values_of
from stoker_runtime.executor.resolve import resolve_quantization
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source

# As publishers leave them: ends, norms, and what chooses experts.
LEFT = re.compile(
    r"embed|wte|wpe|lm_head|output\.weight|norm|ln_|visual|vision|shared_expert_gate|(mlp|block_sparse_moe)\.gate\."
    r"|router|kv_b_proj|feed_forward\.gate\."
)
# How the modules that are left are said to be, and how a matrix is rounded.
FORMATS: dict[str, tuple[Callable[[list[str]], dict[str, Any]], Callable[[Tensor], Quantized]]] = {
    "awq": (lambda left: AWQ_CONFIG | {"modules_to_not_convert": left}, lambda w: awq(w, 32)),
    "gptq": (
        lambda left: gptq_config(32, sym=True, dynamic={f"-:^{re.escape(each)}$": {} for each in left}),
        lambda w: gptq(w, 32, zeros=False),
    ),
    "compressed": (lambda left: compressed_config(32) | {"ignore": left}, lambda w: compressed(w, 32)),
    # One factor for all matrices, so that rows are rounded alike whatever else is in theirs.
    "nvfp4": (
        lambda left: modelopt_config("NVFP4", group_size=16, exclude_modules=left),
        lambda w: nvfp4(w, modelopt=True, most=2.0),
    ),
}  # fmt: skip
# Own tests: test_quantized_hybrid.py, test_nemotron_mixtures.py, test_merged_heads.py; gpt-oss is published in MXFP4
# (test_mixtures.py). The others' matrices lie by columns or in one stack, which is refused (test_merged_heads.py).
ELSEWHERE = (*HYBRIDS, *PLAIN, "GptOss", "GPT2", "GraniteMoe", "Bloom", "Mpt", "MPT", "Falcon")
# As published in 16 bits that one's experts are turned, which is no layout of quantized files.
TURNED = "Qwen3VLMoeForConditionalGeneration"
NAMES = [name for name in ROWS if not name.startswith(ELSEWHERE) and name != TURNED]
EVEN: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 104,
}  # fmt: skip
BY_GPT2 = dict.fromkeys(EVEN) | {"n_embd": 256, "n_head": 16, "n_inner": 256, "vocab_size": 104}
ALL_HEADS = {"num_key_value_heads": 6}
EXPERTS = {"moe_intermediate_size": 64}
LATENT = EXPERTS | ALL_HEADS | {
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "head_dim": None,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "Baichuan": ALL_HEADS, "BaiChuan": ALL_HEADS, "GPTNeoX": ALL_HEADS, "Deepseek": LATENT,
    "MiniCPM3For": LATENT | {"dim_model_base": 24}, "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "MiniCPMFor": {"logits_scaling": 96 / 24, "attention_multiplier": 16**-0.5}, "Qwen3Moe": EXPERTS,
    "Glm4MoeLite": LATENT, "Glm4Moe": EXPERTS, "Qwen3VLMoe": EXPERTS, "Olmoe": {"intermediate_size": 64},
    "GPTJ": BY_GPT2, "GPTBigCode": BY_GPT2,
    "Ernie4_5_Moe": EXPERTS, "Dots1": EXPERTS, "MiniMaxM2": {"intermediate_size": 64},
}  # fmt: skip


def changes_of(name: str) -> dict[str, Any]:
    own = next((more for begin, more in CHANGES.items() if name.startswith(begin)), {})
    sizes = EVEN | own
    row = ROWS[name].changes(random.Random(0))
    rope = row.get("rope_parameters", {})
    if "mrope_section" in rope:
        sizes["rope_parameters"] = rope | {"mrope_section": [3, 2, 3]}
    if name.startswith("Deepseek") and row.get("q_lora_rank", 1) is None:
        sizes["q_lora_rank"] = None
    return sizes


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacks of experts brought apart, as quantized files have them."""
    found = dict(tensors)
    for key in [key for key, tensor in tensors.items() if ".experts." in key and tensor.dim() == 3]:
        room, module = key.rsplit(".", 1)
        for at, matrix in enumerate(found.pop(key)):
            parts = (("gate_proj", "up_proj"), matrix.chunk(2)) if module == "gate_up_proj" else ((module,), (matrix,))
            found |= {f"{room}.{at}.{name}.weight": part.contiguous() for name, part in zip(*parts, strict=True)}
    return found


def is_rounded(name: str, tensor: Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2 and not LEFT.search(name)


def round_rows(model: Any, quantize: Callable[[Tensor], Quantized]) -> None:
    """Each matrix of linear layers and experts becomes what its codes mean."""
    linears = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (name in linears and not LEFT.search(name)) or parameter.dim() == 3:
                parameter.copy_(quantize(parameter.flatten(0, -2).clone())[1].view_as(parameter))


def write(name: str, form: str, folder: Path) -> tuple[Path, Path, Any]:
    """The checkpoint, a dense one of the values that it stands for, and transformers' model of these."""
    row, (configured, quantize) = ROWS[name], FORMATS[form]
    theirs = save_random(name, folder / "made", **changes_of(name))
    settings = json.loads((folder / "made" / "config.json").read_text())
    dense = by_expert(load_file(folder / "made" / "model.safetensors"))
    packed = dict(dense)
    left = [key.removesuffix(".weight") for key, tensor in dense.items() if tensor.dim() == 2 and LEFT.search(key)]
    for key in [key for key, tensor in dense.items() if is_rounded(key, tensor)]:
        parts, dense[key] = quantize(packed.pop(key))
        module = key.removesuffix(".weight")
        for suffix, part in parts.items():
            packed.setdefault(f"{module}.{suffix}", part.contiguous())
    round_rows(theirs, quantize)
    theirs.save_pretrained(folder / "rounded")
    again = load_file(folder / "rounded" / "model.safetensors")
    if row.published is not None:
        again = {key: tensor.contiguous() for key, tensor in row.published(again).items()}
    apart = by_expert(again)
    assert apart.keys() == dense.keys()
    for key, tensor in dense.items():
        assert torch.allclose(apart[key], tensor, rtol=1e-6, atol=1e-9), key
    return *save_both(folder, settings, packed, configured(left), again), theirs


@pytest.mark.matrix("form", take=5)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_quantized_checkpoints_of_the_zoo(name: str, form: str, tmp_path: Path, paged_model: Any) -> None:
    print(f"seed {SEED}")
    quantized, plain, theirs = write(name, form, tmp_path)
    spec = build_spec(read_source(str(quantized)))
    for ours, exact in zip(load(quantized).layers, load(plain).layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            weight, wanted = getattr(ours, field), getattr(exact, field)
            if weight is not None:
                assert getattr(weight, "kind", "packed") != "dense", field
                torch.testing.assert_close(values_of(weight).float(), wanted.data, rtol=1e-6, atol=1e-9)
        if ours.mixture is not None and exact.mixture is not None:
            assert ours.mixture.experts.kind != "dense"
            for at in range(ours.mixture.experts.experts):
                pair = (expert_values(each.mixture.experts, at) for each in (ours, exact))
                for got, meant in zip(*pair, strict=True):
                    torch.testing.assert_close(got, meant, rtol=1e-6, atol=1e-9)
    rng, limit = random.Random(SEED), ROWS[name].limit
    ids = [rng.randrange(3, spec.vocab) for _ in range(41)]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    served = paged_model(str(quantized), quantization=resolve_quantization("auto", spec), max_len=128)
    logits = served.step([(0, ids)], all_logits=True)[0]
    torch.testing.assert_close(logits, expected, atol=2 * limit, rtol=2 * limit)
    served.forget()
    assert_greedy(served.greedy([ids], 64)[0], theirs, ids, 2 * limit)


def test_every_row_has_its_quantized_test() -> None:
    tested = {name.partition("-")[0] for name in NAMES}
    assert all(name.startswith(ELSEWHERE) for name in ROWS if name.partition("-")[0] not in tested)
