"""Experts in host memory that a GPU reads: where they are, the same tokens, and what sleep gives back."""

from __future__ import annotations

import ctypes
import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker_runtime import LLM, SamplingParams
from stoker_runtime.models.hosted_experts import hosted_bytes, staged_bytes
from stoker_runtime.models.layers.staged import CHOICES_AN_EXPERT

pytestmark = pytest.mark.gpu
MIB = 1024**2
EXPERTS, TOP_K, LAYERS, VOCAB, HIDDEN, FFN = 23, 3, 5, 1013, 896, 384


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of no published size: its experts take 47 MB a layer in 16 bits."""
    folder: Path = tmp_path_factory.mktemp("qwen")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN, "head_dim": 128,
        "moe_intermediate_size": FFN, "intermediate_size": 1000, "num_hidden_layers": LAYERS, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": VOCAB,
        "norm_topk_prob": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        parts = {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "mlp.gate": (EXPERTS, HIDDEN),
            "self_attn.q_norm": (128,), "self_attn.k_norm": (128,), "self_attn.q_proj": (768, HIDDEN),
            "self_attn.k_proj": (256, HIDDEN), "self_attn.v_proj": (256, HIDDEN), "self_attn.o_proj": (HIDDEN, 768),
        }  # fmt: skip
        for expert in range(EXPERTS):
            parts |= {f"mlp.experts.{expert}.{name}_proj": (FFN, HIDDEN) for name in ("gate", "up")}
            parts[f"mlp.experts.{expert}.down_proj"] = (HIDDEN, FFN)
        shapes |= {f"model.layers.{layer}.{name}": size for name, size in parts.items()}
    torch.manual_seed(29)
    tensors = {
        f"{name}.weight": (1 + 0.2 * torch.randn(size) if len(size) == 1 else 0.05 * torch.randn(size)).bfloat16()
        for name, size in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def opened(checkpoint: Path, **options: Any) -> LLM:
    gc.collect()  # an engine before it
    torch.cuda.empty_cache()
    given = {"device": "cuda", "max_model_len": 2048, "gpu_memory_utilization": 0.2, "max_num_seqs": 64}
    return LLM(str(checkpoint), **{**given, **options})


def said(llm: LLM, loads: list[list[list[int]]], params: SamplingParams) -> list[list[list[list[int]]]]:
    """The tokens with the graphs that there are at first, and with all."""
    executor: Any = llm.engine.executor
    first = [llm.generate_tokens(each, params) for each in loads]
    while executor.idle():
        pass
    return [first, [llm.generate_tokens(each, params) for each in loads]]


@pytest.mark.parametrize("quantization", ["none", "fp8", "w4"])
def test_the_same_tokens_as_with_all_on_the_device(checkpoint: Path, quantization: str) -> None:
    """Steps of one and of a few tokens read the host's memory, those of many and prompts a copy, both in graphs and
    without; of four bits by one kernel, as the usual choice is another for hosted ones.
    """
    rng = random.Random(quantization)
    assert TOP_K < CHOICES_AN_EXPERT * EXPERTS < 40 * TOP_K
    loads = [
        [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]
        for count, longest in ((1, 9), (1, 1900), (6, 5), (40, 700))
    ]
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    # What is cached would make steps of other sizes.
    options: dict[str, Any] = {"quantization": quantization, "enable_prefix_caching": False}
    if quantization == "w4":
        options["kernels"] = (("experts", "triton"),)
    with opened(checkpoint, **options) as llm:
        expected = said(llm, loads, params)
        weights = llm.engine.executor.plan.weights
    del llm
    with opened(checkpoint, **options, cpu_offload_experts=0.1) as llm:
        executor: Any = llm.engine.executor
        spec, layers = executor.decoder.spec, executor.decoder.weights.layers
        count = len(spec.moe.hosted)
        assert 2 <= count < LAYERS if quantization == "none" else count >= 4
        sizes = hosted_bytes(spec, "bfloat16", quantization), staged_bytes(spec, "bfloat16", quantization)
        assert executor.plan.weights == weights - sizes[0] + sizes[1]
        for layer, each in enumerate(layers):
            data = each.mixture.experts.gate_up.view(torch.uint8).view(-1)[:64]
            if layer in spec.moe.hosted:  # the host reads it, too
                assert ctypes.string_at(data.data_ptr(), 64) == bytes(data.cpu().tolist())
        assert said(llm, loads, params) == expected
        assert executor.graphs.captured > 0


def test_sleep_leaves_them_where_they_are(checkpoint: Path) -> None:
    asked = [[7, 200, 31, 5], list(range(5, 700, 2))]
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    with opened(checkpoint, cpu_offload_experts=0.1, enable_sleep_mode=True) as llm:
        executor: Any = llm.engine.executor
        expected = llm.generate_tokens(asked, params)
        for level in (1, 2, 1):
            awake = torch.cuda.memory_allocated()
            llm.sleep(level)
            # What other engines of this process left in between keeps torch from giving it to the driver.
            assert awake - torch.cuda.memory_allocated() >= executor.plan.weights + executor.plan.kv_bytes
            assert (llm.engine.stats().host_weight_bytes > 0) is (level == 1)
            assert llm.engine.stats().host_weight_bytes <= executor.plan.weights + MIB
            llm.wake_up()
            assert llm.generate_tokens(asked, params) == expected
