"""Batch invariance: a request's logits have the same bits alone and in any batch, chunked, cached and preempted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import real_models
from tests.runtime.bits import Logits, bit_workload, watch_logits
from tests.runtime.models import test_zoo
from torch import Tensor

from stoker_kernels.launch import dispatch
from stoker_runtime import LLM

VOCAB = 104


@pytest.fixture(autouse=True)
def usual_again() -> Iterator[None]:
    yield
    dispatch.demand_invariance(False)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Logits:
    return watch_logits(monkeypatch)


def checkpoint(folder: Path, rng: random.Random, unit: int = 8, experts: int = 0) -> str:
    """A random Llama, or Qwen with norms of queries and keys, or a mixture of `experts`; `unit` divides its sizes."""
    heads, head_dim, layers = rng.choice([2, 6]), rng.choice([1, 2, 3] if unit < 64 else [1, 2]) * min(unit, 64), 2
    hidden, ffn, normed = rng.choice([5, 9]) * unit, rng.choice([7, 11]) * unit, bool(experts) or rng.random() < 0.5
    kv, generator = heads // 2 * head_dim, torch.Generator().manual_seed(rng.getrandbits(30))

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {f"{name}.weight": weight(VOCAB, hidden) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = 1 + weight(hidden)
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, heads * head_dim),
        }  # fmt: skip
        feeds = [f"mlp.experts.{expert}." for expert in range(experts)] or ["mlp."]
        for each in feeds:
            shapes |= {f"{each}gate_proj": (ffn, hidden), f"{each}up_proj": (ffn, hidden)}
            shapes |= {f"{each}down_proj": (hidden, ffn)}
        shapes |= {"mlp.gate": (experts, hidden)} if experts else {}
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim} if normed else {}
        tensors |= {f"model.layers.{layer}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        tensors |= {f"model.layers.{layer}.{name}.weight": 1 + weight(size) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors")
    kind = "Qwen3Moe" if experts else "Qwen3" if normed else "Llama"
    mixture: dict[str, Any] = {
        "num_experts": experts, "num_experts_per_tok": 3, "moe_intermediate_size": ffn, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    config: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"], "model_type": "qwen3_moe" if experts else kind.lower(),
        "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "head_dim": head_dim, "vocab_size": VOCAB, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "eos_token_id": 2, "torch_dtype": "float32", **(mixture if experts else {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("dtype", "quantization", "seed"),
    [("float32", "none", 1), ("bfloat16", "none", 2), ("bfloat16", "fp8", 3), ("bfloat16", "w4", 4)],
)
def test_no_schedule_changes_a_bit_of_logits(
    dtype: str, quantization: str, seed: int, tmp_path: Path, seen: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    check_schedules(checkpoint(tmp_path, rng), dtype, quantization, rng, seen, monkeypatch)


@pytest.mark.matrix(take=2)
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        ("Qwen2MoeForCausalLM", "bfloat16", "none"),
        ("GptOssForCausalLM", "float32", "none"),
        ("Glm4MoeForCausalLM", "bfloat16", "fp8"),
        ("DeepseekV2ForCausalLM", "float32", "none"),
        ("DeepseekV3ForCausalLM", "bfloat16", "none"),
    ],
)
def test_nor_with_a_mixture_or_latents(
    name: str, dtype: str, quantization: str, tmp_path: Path, seen: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {test_zoo.SEED}")
    row = test_zoo.ROWS[name]
    changed = test_zoo.Row(
        row.config, lambda rng: row.changes(rng) | {"vocab_size": VOCAB}, row.published, row.settings
    )
    monkeypatch.setitem(test_zoo.ROWS, name, changed)
    test_zoo.save_random(name, tmp_path)
    check_schedules(str(tmp_path), dtype, quantization, random.Random(test_zoo.SEED), seen, monkeypatch, count=8)


def check_schedules(
    model: str,
    dtype: str,
    quantization: str,
    rng: random.Random,
    seen: Logits,
    monkeypatch: pytest.MonkeyPatch,
    *,
    count: int = 12,
) -> None:
    """Requests alone, crowded with a cache and preemptions, and with drafts."""
    prompts, params = bit_workload(rng, count, VOCAB)
    sizes: dict[str, Any] = {"device": "cpu", "dtype": dtype, "max_model_len": 128, "page_size": 16}
    sizes |= {"batch_invariant": True, "cpu_threads": 1, "quantization": quantization, "runner": "generate"}
    with LLM(
        model, **sizes, max_num_seqs=1, max_num_batched_tokens=128, num_gpu_blocks=40, enable_prefix_caching=False
    ) as roomy:
        alone = [roomy.generate_tokens([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
        executor: Any = roomy.engine.executor
        sight = executor.sight
    known = len(seen)
    for swapped in (0, 20):
        crowd = {"max_num_seqs": 6, "max_num_batched_tokens": rng.randint(11, 30)}
        # As many as the longest sequence. Layers with a window give up pages, but beside a host pool none do.
        crowd["num_gpu_blocks"] = 8 if sight is None or swapped else sight.pages(128)
        with LLM(model, **sizes, **crowd, num_cpu_blocks=swapped) as crowded:
            assert crowded.generate_tokens(prompts, params) == alone
            stats = crowded.engine.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
    # The step that a sequence which ended by a stop id was already in may be the only new one.
    assert len(seen) - known <= len(prompts)
    # Of drafts that are wrong there are other logits: the texts are the same.
    monkeypatch.undo()
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    with LLM(model, **sizes, max_num_seqs=5, num_gpu_blocks=32, speculative_config=drafts) as drafting:
        assert drafting.generate_tokens(prompts, params) == alone
        assert drafting.engine.stats().draft_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("quantization", "kv", "experts"),
    [("none", "auto", 0), ("fp8", "auto", 0), ("none", "fp8", 0), ("w4", "auto", 0), ("none", "auto", 16),
     ("fp8", "auto", 8)],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_bit_on_a_gpu(
    quantization: str, kv: str, experts: int, seed: int, tmp_path: Path, seen: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    model = checkpoint(tmp_path, rng, 128, experts)
    prompts, params = bit_workload(rng, 100, VOCAB)
    sizes: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 256, "page_size": 16}
    sizes |= {"batch_invariant": True, "quantization": quantization, "kv_cache_dtype": kv, "seed": seed}
    sizes |= {"gpu_memory_utilization": 0.3}
    eager, few = {"enforce_eager": True}, {"num_gpu_blocks": 200}
    with LLM(
        model, **sizes, **eager, **few, max_num_seqs=1, max_num_batched_tokens=256, enable_prefix_caching=False
    ) as roomy:
        alone = [roomy.generate_tokens([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    for swapped in (0, 100):
        crowd = {"max_num_seqs": rng.randint(60, 90), "max_num_batched_tokens": rng.randint(100, 400)}
        crowd["num_gpu_blocks"] = 70  # a sequence takes about four, so that these are scarce
        with LLM(model, **sizes, **eager, **crowd, num_cpu_blocks=swapped) as crowded:
            assert crowded.generate_tokens(prompts, params) == alone
            stats = crowded.engine.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
    # As graphs: nothing may be read in a capture, so it is the texts that are compared.
    monkeypatch.undo()
    with LLM(model, **sizes, max_num_seqs=80, max_num_batched_tokens=2048, num_gpu_blocks=400) as graphed:
        assert graphed.generate_tokens(prompts, params) == alone


@pytest.mark.matrix(take=1)
@pytest.mark.parametrize(
    ("device", "name", "count", "seed"),
    [
        # A thousand requests in all.
        *(("cpu", "shape:tiny", 50, block) for block in range(20)),
        pytest.param("cuda", "smollm2", 1000, 1000, marks=pytest.mark.gpu),
        pytest.param("cuda", "shape:qwen3-0.6b", 300, 300, marks=pytest.mark.gpu),
    ],
)
def test_texts_of_a_crowd_are_those_of_lone_runs(device: str, name: str, count: int, seed: int) -> None:
    """Half of them sampled; within graphs on a GPU, by one engine, so that prefixes are cached, too."""
    rng = random.Random(seed)
    model = str(real_models.smollm2()) if name == "smollm2" else name
    sizes: dict[str, Any] = {"dtype": "bfloat16", "quantization": "none"} if device == "cuda" else {"cpu_threads": 1}
    sizes |= {"max_num_seqs": 6, "num_gpu_blocks": 12} if device == "cpu" else {"max_num_seqs": 230}
    sizes |= {"num_gpu_blocks": 400, "max_num_batched_tokens": 1100} if device == "cuda" else {}
    with LLM(
        model, device=device, batch_invariant=True, max_model_len=128, page_size=16, runner="generate", **sizes
    ) as llm:
        prompts, params = bit_workload(rng, count, VOCAB)
        lone = [llm.generate_tokens([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
        assert llm.generate_tokens(prompts, params) == lone
        stats = llm.engine.stats()
    assert min(stats.preemptions, stats.prefix_hits) > 0, "the device was meant to be crowded"
