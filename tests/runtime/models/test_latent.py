"""Latent attention beyond its rows: FP8 checkpoints as DeepSeek V3 has them, what it weighs, crowding, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.executor.test_real_executor import workload
from tests.runtime.models.test_mixtures import changed, prompt
from tests.runtime.weights.test_integer_experts import INT8_CONFIG
from torch import Tensor

from stoker_kernels.quant import LinearWeight, dequantize, quantize_weight
from stoker_runtime import LLM
from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import GIB, DeviceMemory, activation_bytes, plan_memory, resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.parallel.place import Place
from stoker_runtime.parallel.split import split_spec
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]
V3: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 150,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 2,
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny DeepSeek V3, whose merged matrices can have scales for blocks."""
    import transformers

    folder = tmp_path_factory.mktemp("deepseek")
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**V3))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.3 * noise if "norm" in name else 0.1 * noise)
    model.save_pretrained(folder)
    return folder


def quantized(made: dict[str, LinearWeight]) -> Any:
    """An edit that stores projections in FP8 blocks, and the layer that only drafts too."""

    def edit(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        found = {**tensors, "model.layers.3.eh_proj.weight": torch.ones(128, 256)}
        for name, tensor in list(found.items()):
            if "_proj" in name:
                made[name] = weight = quantize_weight(tensor, "fp8_block")
                assert weight.scale is not None
                found |= {name: weight.data, f"{name}_scale_inv": weight.scale}
        config |= {"quantization_config": BLOCKS, "num_nextn_predict_layers": 1}
        return found

    return edit


def test_an_fp8_checkpoint_s_latents_are_widened_by_16_bits(deepseek: Path, tmp_path: Path, paged_model: Any) -> None:
    made: dict[str, LinearWeight] = {}
    folder = changed(deepseek, tmp_path / "fp8", quantized(made))
    ours = paged_model(str(folder))
    for index, layer in enumerate(ours.decoder.weights.layers):
        latent = layer.latent
        assert latent is not None
        kv_b = dequantize(made[f"model.layers.{index}.self_attn.kv_b_proj.weight"])
        assert torch.equal(latent.kv_b.flatten(0, 1), kv_b.float())
        assert latent.q_b.kind == layer.qkv.kind == layer.output.kind == "fp8_block"
    ids = prompt(ours.spec.vocab)
    logits = ours.step([(0, ids)], all_logits=True)[0]
    # Activations are rounded to 8 bits at other places there, by which some tokens choose other experts.
    defined = reference_logits(ours.spec, ours.decoder.weights, ids, 0)
    apart = (logits - defined).norm(dim=1) / defined.norm(dim=1)
    assert apart.median() < 0.3

    def stray(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        return tensors | {"model.layers.1.self_attn.k_proj.weight_scale_inv": torch.ones(1, 1)}

    strange = changed(folder, tmp_path / "stray", stray)
    with pytest.raises(ModelError, match=r"k_proj\.weight_scale_inv is the scale of no quantized weight"):
        load_weights(str(strange), ours.spec, CPU, torch.float32)

    def bare(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if "2.self_attn.kv_b_proj.weight_" not in name}

    with pytest.raises(ModelError, match=r"lacks model\.layers\.2\.self_attn\.kv_b_proj\.weight_scale"):
        load_weights(str(changed(folder, tmp_path / "bare", bare)), ours.spec, CPU, torch.float32)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_bytes_are_those_of_the_arena(quantization: str, deepseek: Path, paged_model: Any) -> None:
    spec = build_spec(read_source(str(deepseek)))
    arena = WeightArena(spec, CPU, torch.bfloat16, quantization)
    assert arena.num_bytes == spec.parameter_bytes("bfloat16", quantization)
    assert ("layers.2.q_b" in arena.quantized) == (quantization == "fp8")
    assert "layers.2.kv_b" in arena.dense
    ids = prompt(spec.vocab)
    exact = paged_model(str(deepseek)).step([(0, ids)])[0]
    ours = paged_model(str(deepseek), dtype=torch.bfloat16, quantization=quantization).step([(0, ids)])[0]
    assert (ours.float() - exact).norm() < (0.3 if quantization == "fp8" else 0.1) * exact.norm()


def test_a_token_s_cache_is_one_latent_a_layer() -> None:
    spec = build_spec(read_source("shape:deepseek-v2-lite"))
    assert spec.kv_bytes_per_token("bfloat16") == 27 * (512 + 64) * 2
    assert spec.parameter_bytes("bfloat16") / ITEM_BYTES["bfloat16"] / 1e9 == pytest.approx(15.7, abs=0.05)
    config = resolve(EngineConfig(model="m", max_model_len=32768), spec, "cuda")
    plan = plan_memory(config, spec, DeviceMemory(80 * GIB, GIB), weights=spec.parameter_bytes("bfloat16"), state=GIB)
    assert plan.page_bytes == 27 * 576 * 2 * config.page_size
    more = activation_bytes(config, spec, 1000) - activation_bytes(config, spec, 0)
    widest = 16 * (192 + 2 * 512 + 2 * 128 + 128)  # queries, absorbed and attended, widened, values
    assert more > 1000 * 2 * widest


def test_attention_is_scaled_by_the_square_of_what_yarn_says() -> None:
    spec = build_spec(read_source("shape:deepseek-v2-lite"))
    assert spec.rope.attention_factor == 1.0
    assert spec.attention_scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)
    assert spec.max_position == 163840


@pytest.fixture
def crowd(deepseek: Path) -> dict[str, Any]:
    return {"model": str(deepseek), "device": "cpu", "dtype": "float32", "max_model_len": 128, "page_size": 16}


def test_crowding_changes_no_token(crowd: dict[str, Any]) -> None:
    """Chunks among decodes, prefixes of others' pages, and sequences that come back from the host or are run anew."""
    prompts, drawn = workload(7)
    params = [replace(each, max_tokens=min(each.max_tokens, 24)) for each in drawn]
    with LLM(**crowd, max_num_seqs=1, max_num_batched_tokens=128, enable_prefix_caching=False) as roomy:
        alone = [roomy.generate_tokens([each], [one])[0] for each, one in zip(prompts, params, strict=True)]
    sizes: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "num_gpu_blocks": 9, "num_cpu_blocks": 20}
    with LLM(**crowd, **sizes) as crowded:
        assert crowded.generate_tokens(prompts, params) == alone
        stats = crowded.engine.stats()
        crowded.engine.scheduler.check()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0


def refusal(deepseek: Path, folder: Path, **settings: Any) -> str:
    """What a configuration with other settings is refused with."""
    config = json.loads((deepseek / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(ModelError) as refused:
        build_spec(read_source(str(folder)))
    return refused.value.message


def as_e4m3(x: Tensor, scale: float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_latents_in_fp8_are_those_of_transformers_rounded(
    scale: float, deepseek: Path, tmp_path: Path, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cached of a token, its normed latent and its turned key, through e4m3; by a checkpoint's scales, too."""
    import transformers
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    model = transformers.DeepseekV3ForCausalLM.from_pretrained(deepseek).eval()
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _, __, out: as_e4m3(out, scale))
    turn = theirs.apply_rotary_pos_emb_interleave

    def turned(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        q, k = turn(*args, **kwargs)
        return q, as_e4m3(k, scale)

    ids = prompt(50, 96)
    with torch.no_grad():
        exact = transformers.DeepseekV3ForCausalLM.from_pretrained(deepseek)(torch.tensor([ids])).logits[0]
        monkeypatch.setattr(theirs, "apply_rotary_pos_emb_interleave", turned)
        rounded = model(torch.tensor([ids])).logits[0]

    def scaled(tensors: Tensors, _: dict[str, Any]) -> Tensors:
        names = (f"model.layers.{layer}.self_attn.{each}_scale" for layer in range(3) for each in "kv")
        return tensors | {name: torch.tensor([scale]) for name in names}

    folder = str(changed(deepseek, tmp_path / "m", scaled) if scale != 1.0 else deepseek)
    ours = paged_model(folder, kv_dtype=torch.float8_e4m3fn)
    whole = ours.step([(0, ids)], all_logits=True)[0]
    ours.forget()
    ours.step([(0, ids[:31]), (1, ids)])
    by_chunks = ours.step([(1, [5]), (0, ids[31:])], all_logits=True)[1]
    for got, wanted in ((whole, rounded), (by_chunks, rounded[31:])):
        apart = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
        # A value on the edge between two e4m3 numbers may fall either way, and experts then be others.
        assert apart.median() < 2e-3
        assert apart.mean() < 0.02
    assert ((exact - rounded).norm(dim=1) / exact.norm(dim=1)).median() > 0.02


def test_latents_in_fp8_take_half_and_are_served(deepseek: Path) -> None:
    spec = build_spec(read_source(str(deepseek)))
    assert 2 * spec.kv_bytes_per_token("fp8") == spec.kv_bytes_per_token("bfloat16") == 3 * 162 * 2
    options: dict[str, Any] = {
        "model": str(deepseek), "device": "cpu", "dtype": "float32", "max_model_len": 128, "page_size": 16,
        "kv_cache_dtype": "fp8",
    }  # fmt: skip
    prompts, drawn = workload(5)
    prompts = [[token % 90 + 3 for token in each] for each in prompts[:4]]
    params = [replace(each, max_tokens=12) for each in drawn[:4]]
    with LLM(**options, max_num_seqs=4) as together:
        found = together.generate_tokens(prompts, params)
        assert together.generate_tokens(prompts, params) == found  # from the prefix cache
    with LLM(**options, max_num_seqs=1) as alone:
        assert [alone.generate_tokens([each], [one])[0] for each, one in zip(prompts, params, strict=True)] == found


def test_what_cannot_be_served_is_refused_by_name(deepseek: Path, tmp_path: Path) -> None:
    spec = build_spec(read_source(str(deepseek)))
    assert split_spec(spec, Place(0, 2, 1)).attended_size == 2 * 28
    made: dict[str, LinearWeight] = {}
    narrow = build_spec(read_source(str(changed(deepseek, tmp_path / "fp8", quantized(made)))))
    with pytest.raises(ConfigError, match="q_b would be cut at 64, within its FP8 blocks of 128"):
        split_spec(narrow, Place(0, 2, 1))
    v2: dict[str, Any] = {"architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "softmax"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"attention_bias": True}, "attention_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"quantization_config": INT8_CONFIG}, "latent attention in INT8 with activations in INT8 is not supported"),
        ({**v2, "norm_topk_prob": True}, "norm_topk_prob"),
        ({**v2, "norm_topk_prob": False, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    ]
    for number, (settings, message) in enumerate(cases):
        assert message in refusal(deepseek, tmp_path / str(number), **settings)
