"""Batch invariance: a request's logits have the same bits alone and in any batch, chunked, cached and preempted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stoker_kernels.launch import dispatch
from stoker_runtime import LLM
from stoker_runtime.request import SamplingParams
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.step.batch import SlotAssign

Logits = dict[tuple[int, int], bytes]
VOCAB = 104


@pytest.fixture(autouse=True)
def usual_again() -> Iterator[None]:
    yield
    dispatch.demand_invariance(False)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """The logits of each (request's seed, position), checked to be the same whenever they are computed."""
    found: Logits = {}
    seeds: dict[tuple[Sampler, int], int] = {}
    assign, call = Sampler.assign, Sampler.__call__

    def assigned(self: Sampler, assigns: Sequence[SlotAssign]) -> None:
        seeds.update({(self, each.slot): each.seed for each in assigns})
        assign(self, assigns)

    def called(self: Sampler, logits: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        for row, slot in enumerate(row_slots.tolist()):
            if (self, slot) in seeds:  # no padding, and no rehearsal before the first request
                key = seeds[self, slot], int(positions[row])
                bits = logits[row].clone().view(torch.uint8).cpu().numpy().tobytes()
                assert found.setdefault(key, bits) == bits, f"seed and position {key}"
        return call(self, logits, row_slots, positions, mode)

    monkeypatch.setattr(Sampler, "assign", assigned)
    monkeypatch.setattr(Sampler, "__call__", called)
    return found


def checkpoint(folder: Path, rng: random.Random, unit: int = 8) -> str:
    """A random Llama, or Qwen with norms of queries and keys; `unit` divides its sizes."""
    heads, head_dim, layers = rng.choice([2, 6]), rng.choice([1, 2, 3] if unit < 64 else [1, 2]) * min(unit, 64), 2
    hidden, ffn, normed = rng.choice([5, 9]) * unit, rng.choice([7, 11]) * unit, rng.random() < 0.5
    kv, generator = heads // 2 * head_dim, torch.Generator().manual_seed(rng.getrandbits(30))

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {f"{name}.weight": weight(VOCAB, hidden) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = 1 + weight(hidden)
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn),
        }  # fmt: skip
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim} if normed else {}
        tensors |= {f"model.layers.{layer}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        tensors |= {f"model.layers.{layer}.{name}.weight": 1 + weight(size) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors")
    kind = "Qwen3" if normed else "Llama"
    config: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "head_dim": head_dim, "vocab_size": VOCAB, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def workload(rng: random.Random, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share prefixes, each with a seed of its own, greedy or sampled."""
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts = [
        shared[: rng.choice([0, 16, 33, 40])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 1.0]), seed=seed, ignore_eos=rng.random() < 0.5,
            top_k=rng.choice([0, 7]), presence_penalty=rng.choice([0.0, 0.7]), logprobs=rng.choice([None, 3]),
        )
        for seed in range(count)
    ]  # fmt: skip
    return prompts, params


@pytest.mark.parametrize(
    ("dtype", "quantization", "seed"), [("float32", "none", 1), ("bfloat16", "none", 2), ("bfloat16", "fp8", 3)]
)
def test_no_schedule_changes_a_bit_of_logits(
    dtype: str, quantization: str, seed: int, tmp_path: Path, seen: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    model = checkpoint(tmp_path, rng)
    prompts, params = workload(rng, 12)
    sizes: dict[str, Any] = {"device": "cpu", "dtype": dtype, "max_model_len": 128, "page_size": 16}
    sizes |= {"batch_invariant": True, "cpu_threads": 1, "quantization": quantization}
    with LLM(
        model, **sizes, max_num_seqs=1, max_num_batched_tokens=128, num_gpu_blocks=8, enable_prefix_caching=False
    ) as roomy:
        alone = [roomy.generate_tokens([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    known = len(seen)
    for swapped in (0, 20):
        crowd = {"max_num_seqs": 6, "max_num_batched_tokens": rng.randint(11, 30), "num_gpu_blocks": 10}
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
@pytest.mark.parametrize(("quantization", "kv"), [("none", "auto"), ("fp8", "auto"), ("none", "fp8")])
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_bit_on_a_gpu(
    quantization: str, kv: str, seed: int, tmp_path: Path, seen: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    model = checkpoint(tmp_path, rng, unit=128)
    prompts, params = workload(rng, 100)
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
        with LLM(model, **sizes, **eager, **few, **crowd, num_cpu_blocks=swapped) as crowded:
            assert crowded.generate_tokens(prompts, params) == alone
    # As graphs: nothing may be read in a capture, so it is the texts that are compared.
    monkeypatch.undo()
    with LLM(model, **sizes, max_num_seqs=80, max_num_batched_tokens=2048, num_gpu_blocks=400) as graphed:
        assert graphed.generate_tokens(prompts, params) == alone
