"""Every architecture of the table against transformers: random tiny checkpoints in the published layout, odd sizes.

A row says the configuration's class and what differs from BASE; sizes and weights are drawn anew in every run, from a
seed that a failure prints. Where the published names are not those that transformers saves, a row renames them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.models.alibi_rows import ALIBIS
from tests.runtime.models.greedy import assert_greedy, assert_logits
from tests.runtime.models.hybrid_rows import HYBRIDS
from tests.runtime.models.latent_rows import LATENTS
from tests.runtime.models.mixture_rows import MIXTURES
from tests.runtime.models.plain_models import PLAIN, PlainModel
from tests.runtime.models.row_sizes import fixed, gpt2, neox, square
from tests.runtime.models.variant_rows import VARIANTS
from torch import Tensor

from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.models.architectures import ARCHITECTURES

SEED = random.SystemRandom().randrange(1 << 30)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """`config`: transformers' class; `changes` to the common sizes, which may be drawn by the given random numbers.

    `published` turns what transformers saves into the published names and layout, `settings` its config.json.
    Logits may be apart by `limit`. `model`: transformers' class of a model that sees, whose text model is the row.
    `plain`: a model of the tests in the place of transformers'. `attention`: which of transformers' ways to attend; its
    plainest one adds Falcon's slopes twice.
    """

    config: str
    changes: Callable[[random.Random], dict[str, Any]] = field(default=lambda rng: {})
    published: Callable[[Tensors], Tensors] | None = None
    settings: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    limit: float = 2e-4
    model: str = ""
    attention: str = "eager"
    plain: type[PlainModel] | None = None


# What sees, as small as it may be.
VISION = {
    "depth": 1, "hidden_size": 32, "out_hidden_size": 60, "num_heads": 2, "intermediate_size": 32, "embed_dim": 32,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "head_dim": 16, "num_attention_heads": 2,
}  # fmt: skip


def _mrope(section: list[int], **more: Any) -> Callable[[random.Random], dict[str, Any]]:
    """Sections of rotated pairs for time, height and width, which text has alike."""
    parameters = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": section, **more}
    return lambda rng: {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20,
                        "rope_parameters": parameters}  # fmt: skip


def _seeing_experts(rng: random.Random) -> dict[str, Any]:
    sizes = _mrope([4, 3, 3], mrope_interleaved=True)(rng)
    mixture = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": rng.randrange(20, 29)}
    return {**sizes, **mixture, "mlp_only_layers": [1]}


def _turned_experts(tensors: Tensors) -> Tensors:
    """As published: columns for rows."""
    return {name: tensor.mT if ".experts." in name else tensor for name, tensor in tensors.items()}


def _older_names(tensors: Tensors) -> Tensors:
    return _renamed((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))(tensors)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """As the first files of Qwen2.5-VL: the text model's settings at the top, its rotation called mrope."""
    text = dict(config.pop("text_config"))
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def _renamed(*rules: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    def rename(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            for pattern, replacement in rules:
                name = re.sub(pattern, replacement, name)
            found[name] = tensor
        return found

    return rename


def _by_kv_head(name: str, replacement: str, heads: int, kv_heads: int) -> Callable[[Tensors], Tensors]:
    """Q, K and V of a layer merged as InternLM 2 has them: a KV head's queries, its key and its value together."""

    def merge(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for key in tensors:
            if key.endswith(name.replace("#", "q")):
                q, k, v = (found.pop(key.replace("q_proj", f"{each}_proj")) for each in "qkv")
                parts = [part.unflatten(0, (kv_heads, -1)) for part in (q, k, v)]
                found[key.replace(name.replace("#", "q"), replacement)] = torch.cat(parts, dim=1).flatten(0, 1)
        return found

    return merge


def _merged_rows(tensors: Tensors) -> Tensors:
    """Q, K and V of a layer one after the other, as Baichuan has them."""
    found = dict(tensors)
    for key in tensors:
        if "q_proj" in key:
            parts = [found.pop(key.replace("q_proj", f"{each}_proj")) for each in "qkv"]
            found[key.replace("q_proj", "W_pack")] = torch.cat(parts)
    return found


def _exaone_settings(config: dict[str, Any]) -> dict[str, Any]:
    names = {
        "num_hidden_layers": "num_layers",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    renamed = {names.get(key, key): value for key, value in config.items()}
    return {**renamed, "architectures": ["ExaoneForCausalLM"]}


def _longrope(rng: random.Random, trained: int) -> dict[str, Any]:
    pairs = 8
    return {
        "head_dim": None,
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": trained,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1 + rng.random() for _ in range(pairs)],
            "long_factor": [3 + 2 * rng.random() for _ in range(pairs)],
        },
    }


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
# A prompt of the test lies beyond several of the trained lengths.
GROWING = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 13,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
ONE_KV_HEAD = {"num_key_value_heads": 1}
HYBRID = {"sliding_window": 9, "num_hidden_layers": 5}

ROWS: dict[str, Row] = {
    "LlamaForCausalLM": Row("LlamaConfig", fixed(rope_parameters=LLAMA3)),
    "MistralForCausalLM": Row("MistralConfig", fixed(sliding_window=7)),
    "Qwen2ForCausalLM": Row("Qwen2Config", square()),
    "Qwen3ForCausalLM": Row("Qwen3Config", fixed(rope_parameters=YARN)),
    "Phi3ForCausalLM": Row("Phi3Config", lambda rng: _longrope(rng, 512)),
    "Phi3ForCausalLM-long": Row("Phi3Config", lambda rng: _longrope(rng, 32)),
    "GraniteForCausalLM": Row(
        "GraniteConfig",
        lambda rng: {
            "embedding_multiplier": 3 + rng.random(), "residual_multiplier": 0.3 + rng.random(),
            "attention_multiplier": 0.1 + rng.random() / 4, "logits_scaling": 2 + rng.random(), "attention_bias": True,
        },
    ),
    "SmolLM3ForCausalLM": Row("SmolLM3Config", fixed(no_rope_layer_interval=2, attention_bias=True)),
    "GlmForCausalLM": Row("GlmConfig", fixed(head_dim=20)),
    "ArceeForCausalLM": Row("ArceeConfig", fixed(mlp_bias=True)),
    "HeliumForCausalLM": Row("HeliumConfig", fixed(hidden_size=60, num_attention_heads=5, head_dim=12, **ONE_KV_HEAD)),
    "SeedOssForCausalLM": Row("SeedOssConfig", fixed(attention_out_bias=True)),
    "Ernie4_5ForCausalLM": Row("Ernie4_5Config", fixed(use_bias=True)),
    "HunYuanDenseV1ForCausalLM": Row(
        "HunYuanDenseV1Config",
        lambda rng: {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0,
                                             "alpha": 1 + 50 * rng.random()}},
    ),
    "HunYuanDenseV1ForCausalLM-plain": Row("HunYuanDenseV1Config", fixed(attention_bias=True, head_dim=20)),
    "GemmaForCausalLM": Row("GemmaConfig"),
    "Gemma2ForCausalLM": Row(
        "Gemma2Config",
        fixed(
            query_pre_attn_scalar=19, attn_logit_softcapping=2.5, final_logit_softcapping=3.5, hidden_size=72, **HYBRID
        ),
    ),
    "Gemma3ForCausalLM": Row(
        "Gemma3TextConfig",
        fixed(
            query_pre_attn_scalar=19, hidden_size=72, sliding_window_pattern=2,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            **HYBRID,
        ),
    ),
    "Gemma3ForConditionalGeneration": Row(
        "Gemma3TextConfig",
        fixed(
            hidden_size=72, tie_word_embeddings=True, layer_types=["sliding_attention", "full_attention"] * 2,
            num_hidden_layers=4, sliding_window=5,
        ),
        lambda tensors: {
            **_renamed((r"^model\.", "language_model.model."))(tensors), "vision_tower.patch.weight": torch.zeros(3, 3)
        },
        lambda config: {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config},
    ),
    # Text through models that see, as older files have them, and newer ones.
    "Qwen2VLForConditionalGeneration": Row(
        "Qwen2VLConfig", _mrope([2, 4, 4]), model="Qwen2VLForConditionalGeneration", published=_older_names,
        settings=_flat,
    ),
    "Qwen2_5_VLForConditionalGeneration": Row(
        "Qwen2_5_VLConfig", _mrope([4, 3, 3]), model="Qwen2_5_VLForConditionalGeneration", published=_older_names,
        settings=_flat,
    ),
    "Qwen2_5_VLForConditionalGeneration-nested": Row(
        "Qwen2_5_VLConfig", _mrope([4, 3, 3]), model="Qwen2_5_VLForConditionalGeneration"
    ),
    "Qwen3VLForConditionalGeneration": Row(
        "Qwen3VLConfig", _mrope([4, 3, 3], mrope_interleaved=True), model="Qwen3VLForConditionalGeneration"
    ),
    "Qwen3VLMoeForConditionalGeneration": Row(
        "Qwen3VLMoeConfig", _seeing_experts, _turned_experts, model="Qwen3VLMoeForConditionalGeneration"
    ),
    "Qwen3VLMoeForConditionalGeneration-saved": Row(
        "Qwen3VLMoeConfig", _seeing_experts, model="Qwen3VLMoeForConditionalGeneration"
    ),
    "Ministral3ForCausalLM": Row("Ministral3Config", fixed(rope_parameters=GROWING)),
    "Ministral3ForCausalLM-window": Row("Ministral3Config", fixed(rope_parameters=GROWING, sliding_window=11)),
    # As Mistral Small has them, whose text alone says whether the head is tied; and Ministral 3.
    "Mistral3ForConditionalGeneration": Row(
        "Mistral3Config", fixed(model_type="mistral", sliding_window=None), model="Mistral3ForConditionalGeneration",
        settings=lambda config: {key: value for key, value in config.items() if key != "tie_word_embeddings"},
    ),
    "Mistral3ForConditionalGeneration-nested": Row(
        "Mistral3Config", fixed(model_type="ministral3", rope_parameters=GROWING),
        _renamed((r"^language_model\.model\.", "model.language_model."), (r"^language_model\.lm_head", "lm_head"),
                 (r"^(vision_tower|multi_modal_projector)", r"model.\1")),
        model="Mistral3ForConditionalGeneration",
    ),
    "Olmo2ForCausalLM": Row("Olmo2Config"),
    "Olmo3ForCausalLM": Row("Olmo3Config", fixed(**HYBRID)),
    "Exaone4ForCausalLM": Row("Exaone4Config", fixed(sliding_window_pattern=4, **HYBRID)),
    "Exaone4ForCausalLM-whole": Row("Exaone4Config", fixed(sliding_window=None, layer_types=["full_attention"] * 3)),
    "Glm4ForCausalLM": Row("Glm4Config", fixed(head_dim=20)),
    "PhiForCausalLM": Row("PhiConfig", square(partial_rotary_factor=0.5)),
    "GPTNeoXForCausalLM": Row("GPTNeoXConfig", neox()),
    "GPTNeoXForCausalLM-serial": Row(
        "GPTNeoXConfig", neox(use_parallel_residual=False)
    ),
    "CohereForCausalLM": Row("CohereConfig", square(logit_scale=0.3)),
    "CohereForCausalLM-qk-norm": Row(
        "CohereConfig", square(use_qk_norm=True)
    ),
    "Cohere2ForCausalLM": Row(
        "Cohere2Config", square(**HYBRID)
    ),
    "StableLmForCausalLM": Row(
        "StableLmConfig", square(use_qkv_bias=True, partial_rotary_factor=0.5)
    ),
    "StableLmForCausalLM-parallel": Row(
        "StableLmConfig",
        square(use_parallel_residual=True, qk_layernorm=True, partial_rotary_factor=0.5),
    ),
    "NemotronForCausalLM": Row("NemotronConfig", fixed(mlp_bias=True)),
    "Jais2ForCausalLM": Row("Jais2Config", square()),
    "Jais2ForCausalLM-unbiased": Row("Jais2Config", square(attention_bias=False, mlp_bias=False)),
    "Starcoder2ForCausalLM": Row("Starcoder2Config", square(sliding_window=11)),
    "GPT2LMHeadModel": Row("GPT2Config", gpt2),
    "GPTBigCodeForCausalLM": Row("GPTBigCodeConfig", gpt2),
    "GPTBigCodeForCausalLM-all-heads": Row("GPTBigCodeConfig", lambda rng: gpt2(rng) | {"multi_query": False}),
    "GPTJForCausalLM": Row("GPTJConfig", lambda rng: {**gpt2(rng), "rotary_dim": 6, "tie_word_embeddings": False}),
    # Models whose code is not in transformers, as the published converters to these classes know them.
    "InternLM2ForCausalLM": Row(
        "LlamaConfig",
        fixed(num_attention_heads=6, num_key_value_heads=2, rope_theta=1e6),
        lambda tensors: _renamed(
            (r"self_attn\.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"), ("embed_tokens", "tok_embeddings"), ("lm_head", "output"),
        )(_by_kv_head("self_attn.#_proj.weight", "attention.wqkv.weight", 6, 2)(tensors)),
        lambda config: {**config, "architectures": ["InternLM2ForCausalLM"], "bias": False},
    ),
    "InternLM3ForCausalLM": Row(
        "LlamaConfig",
        fixed(attention_bias=True, mlp_bias=True),
        settings=lambda config: {**config, "architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True},
    ),
    "BaiChuanForCausalLM": Row(
        "LlamaConfig",
        square(num_attention_heads=4, num_key_value_heads=4, hidden_size=64),
        _merged_rows,
        lambda config: {**config, "architectures": ["BaiChuanForCausalLM"]},
    ),
    "BaichuanForCausalLM": Row(
        "LlamaConfig",
        square(num_attention_heads=4, num_key_value_heads=4, hidden_size=64, tie_word_embeddings=False),
        _merged_rows,
        lambda config: {**config, "architectures": ["BaichuanForCausalLM"]},
    ),
    "ExaoneForCausalLM": Row(
        "LlamaConfig",
        square(rope_parameters=LLAMA3),
        _renamed(
            (r"^model\.", "transformer."), (r"\.layers\.", ".h."), (r"self_attn\.o_proj", "attn.attention.out_proj"),
            (r"self_attn\.", "attn.attention."), (r"mlp\.gate_proj", "mlp.c_fc_0"), (r"mlp\.up_proj", "mlp.c_fc_1"),
            (r"mlp\.down_proj", "mlp.c_proj"), ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
            ("embed_tokens", "wte"), (r"transformer\.norm", "transformer.ln_f"),
        ),
        _exaone_settings,
    ),
    "MiniCPMForCausalLM": Row(
        "GraniteConfig",
        lambda rng: {
            "hidden_size": 60, "num_hidden_layers": 4, "head_dim": None, "num_attention_heads": 5,
            "num_key_value_heads": 1, "embedding_multiplier": 7.0, "residual_multiplier": 1.4 / 2,
            "attention_multiplier": 12**-0.5, "logits_scaling": 60 / 24,
        },
        settings=lambda config: {
            **{key: value for key, value in config.items() if not key.endswith(("_multiplier", "_scaling"))},
            "architectures": ["MiniCPMForCausalLM"], "scale_emb": 7, "scale_depth": 1.4, "dim_model_base": 24,
        },
    ),
}  # fmt: skip


ROWS |= {name: Row(*row) for name, row in (MIXTURES | LATENTS | ALIBIS).items()}
ROWS |= {name: Row(**row) for name, row in HYBRIDS.items()}
ROWS |= {name: Row("", changes, plain=kind) for name, (kind, changes) in PLAIN.items()}
VARIED = {name: Row(**row) for name, row in VARIANTS.items()}
NULLABLE = ("sliding_window", "pad_token_id", "n_inner")


def _sizes(rng: random.Random) -> dict[str, Any]:
    """Sizes that no kernel is made for, and that no two rows share."""
    kv_heads, group, head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([8, 16, 20, 24])
    return {
        "vocab_size": rng.randrange(90, 140),
        "hidden_size": 18 * rng.choice([2, 4, 6]),
        "intermediate_size": rng.randrange(50, 120),
        "num_hidden_layers": 3,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def save_random(name: str, folder: Path, **changes: Any) -> Any:
    """Save a random model of the row, and of `changes` to its sizes, into `folder`; returns transformers' own."""
    import transformers

    row, rng = (ROWS | VARIED)[name], random.Random(f"{SEED}{name}")
    if row.plain is not None:
        plain = row.plain.random({**row.changes(rng), **changes}, rng)
        plain.save_pretrained(folder)
        return plain
    sizes = {**_sizes(rng), **row.changes(rng), **changes}
    given = {key: value for key, value in sizes.items() if value is not None or key in NULLABLE}
    if row.model:
        given = {"text_config": given, "vision_config": VISION, "tie_word_embeddings": given["tie_word_embeddings"]}
    config = getattr(transformers, row.config)(**given)
    config._attn_implementation, config._experts_implementation = row.attention, "eager"
    make = getattr(transformers, row.model) if row.model else transformers.AutoModelForCausalLM.from_config
    model = make(config).float().eval()
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = ("norm" in key or "ln_" in key) and key.endswith("weight")
            parameter.copy_(1.0 + 0.3 * noise if is_gain else 0.2 * noise)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    file, settings = folder / "model.safetensors", folder / "config.json"
    if row.published is not None:
        save_file({key: value.contiguous() for key, value in row.published(load_file(file)).items()}, file)
    if row.settings is not None:
        settings.write_text(json.dumps(row.settings(json.loads(settings.read_text()))))
    return model


def by_kind(names: Iterable[str]) -> list[Any]:
    """Cases (kind of layers, name), of which runs draw some of each kind: so none of these is ever left out."""
    return [pytest.param(kind_of(name), name, id=name) for name in names]


def kind_of(name: str) -> str:
    kinds = {"mixture": MIXTURES, "latent": LATENTS, "slopes": ALIBIS, "state": HYBRIDS, "published": PLAIN}
    return next((kind for kind, rows in kinds.items() if name in rows), "dense")


@pytest.mark.matrix("kind", take=5)
@pytest.mark.parametrize(("kind", "name"), by_kind(ROWS))
def test_logits_and_tokens_equal_transformers(kind: str, name: str, tmp_path: Path, paged_model: Any) -> None:
    assert_equals_transformers(name, tmp_path, paged_model)


@pytest.mark.matrix(take=3)
@pytest.mark.parametrize("name", VARIED)
def test_what_a_configuration_may_turn_on_or_off_equals_transformers(
    name: str, tmp_path: Path, paged_model: Any
) -> None:
    assert_equals_transformers(name, tmp_path, paged_model)


def assert_equals_transformers(name: str, tmp_path: Path, paged_model: Any) -> None:
    """Logits of whole prompts, 64 greedy tokens, and the same logits by chunks among decodes."""
    print(f"seed {SEED}")
    theirs, limit = save_random(name, tmp_path), (ROWS | VARIED)[name].limit
    ours = paged_model(str(tmp_path), slots=3)
    rng = random.Random(SEED)
    prompts = [[rng.randrange(3, ours.spec.vocab) for _ in range(count)] for count in (37, 1, 60)]
    expected = ours.step(list(enumerate(prompts)), all_logits=True)
    for got, prompt in zip(expected, prompts, strict=True):
        assert_logits(got, theirs, prompt, limit)
    # By what a benchmark checks its tokens, too.
    assert_logits(reference_logits(ours.spec, ours.decoder.weights, prompts[0], 0), theirs, prompts[0], limit)
    ours.forget()
    assert_greedy(ours.greedy(prompts[:1], 64)[0], theirs, prompts[0], limit)
    ours.forget()
    ours.step([(0, prompts[2][:23]), (1, prompts[0])])
    ours.step([(1, [5]), (0, prompts[2][23:24])])
    mixed = ours.step([(1, [6]), (2, prompts[1]), (0, prompts[2][24:])])
    torch.testing.assert_close(mixed[2], expected[2][-1], atol=limit, rtol=limit)
    torch.testing.assert_close(mixed[1], expected[1][-1], atol=limit, rtol=limit)


NARROW = (
    "CohereForCausalLM-qk-norm", "Gemma2ForCausalLM", "GPT2LMHeadModel", "GraniteForCausalLM",
    "NemotronForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM", "Phi3SmallForCausalLM", "BloomForCausalLM",
    "BaichuanForCausalLM-2-13b", "FalconForCausalLM-few-kv-heads",
)  # fmt: skip


@pytest.mark.matrix(take=4)
@pytest.mark.parametrize("name", NARROW)
def test_narrower_numbers_stay_near(name: str, tmp_path: Path, paged_model: Any) -> None:
    """The ways that 16 and 8 bits take through the kinds of layers, with and without fused quantization."""
    print(f"seed {SEED}")
    save_random(name, tmp_path)
    rng, logits = random.Random(SEED), {}
    prompt = [rng.randrange(3, 90) for _ in range(40)]
    for dtype, quantization in ((torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "fp8")):
        model = paged_model(str(tmp_path), dtype=dtype, quantization=quantization)
        logits[dtype, quantization] = model.step([(0, prompt)], all_logits=True)[0].float()
    exact, half, eighth = logits.values()
    assert 0 < (half - exact).norm() < 0.15 * exact.norm()
    assert 0 < (eighth - half).norm() < 0.6 * exact.norm()


def test_every_row_of_the_table_is_tested() -> None:
    assert {name.partition("-")[0] for name in ROWS} == set(ARCHITECTURES)
