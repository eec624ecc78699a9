"""Every architecture that is read from GGUF, against transformers on the checkpoint that the file was made of."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.models.greedy import assert_greedy
from tests.runtime.models.test_zoo import ROWS, SEED, save_random
from tests.runtime.weights import gguf_zoo
from tests.runtime.weights.test_gguf import NAMES

from stoker_kernels.moe import ExpertWeights
from stoker_runtime.bench.reference.mixture import expert_values
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.gguf import GGUF_ROWS
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import Place, places
from stoker_runtime.weights.load import load_weights

Kind = gguf.GGMLQuantizationType
# DeepSeek's two factors are one in files.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.8,
    "mscale_all_dim": 0.8,
}  # fmt: skip

# By what queries are scaled, no file says.
HEADED = {"head_dim": 22, "query_pre_attn_scalar": 22}
# The file's architecture, the row of the table's test, and what of its sizes no file can say.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("gemma", "GemmaForCausalLM", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", HEADED | {"tie_word_embeddings": True}),
    # Every sixth layer looks back further.
    "gemma3": (
        "gemma3", "Gemma3ForCausalLM",
        HEADED | {"tie_word_embeddings": True, "num_hidden_layers": 7, "sliding_window_pattern": 6},
    ),
    "granite": ("granite", "GraniteForCausalLM", {"attention_bias": False}),
    "smollm3": (
        "smollm3", "SmolLM3ForCausalLM",
        {"no_rope_layer_interval": 4, "num_hidden_layers": 5, "attention_bias": False},
    ),
    "mixtral": ("llama", "MixtralForCausalLM", {}),
    "mistral3": ("mistral3", "Mistral3ForConditionalGeneration", {}),
    "ministral3": ("mistral3", "Ministral3ForCausalLM", {}),
    "qwen2moe": (
        "qwen2moe", "Qwen2MoeForCausalLM",
        {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
    "qwen3moe": ("qwen3moe", "Qwen3MoeForCausalLM", {"mlp_only_layers": []}),
    # Of text it is a Qwen3 of experts.
    "qwen3vlmoe": ("qwen3vlmoe", "Qwen3MoeForCausalLM", {"mlp_only_layers": []}),
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
    "jais2": ("jais2", "Jais2ForCausalLM", {}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "starcoder": ("starcoder", "GPTBigCodeForCausalLM", {}),
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
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM", {}),
    "nemotron_h-biased": ("nemotron_h", "NemotronHForCausalLM-biased", {}),
    "nemotron_h_moe": ("nemotron_h_moe", "NemotronHForCausalLM-mixture", {}),
    "nemotron_h_moe-first": ("nemotron_h_moe", "NemotronHForCausalLM-mixture-first", {}),
    "qwen3next": ("qwen3next", "Qwen3NextForCausalLM", {"mlp_only_layers": []}),
    "internlm2": ("internlm2", "InternLM2ForCausalLM", {}),
    "exaone": ("exaone", "ExaoneForCausalLM", {}),
    "exaone4": ("exaone4", "Exaone4ForCausalLM", {}),
    "exaone4-whole": ("exaone4", "Exaone4ForCausalLM-whole", {}),
    "baichuan": ("baichuan", "BaichuanForCausalLM", {}),
    # Which generation and which size it is, vocabulary and layers say.
    "baichuan-13b": ("baichuan", "BaichuanForCausalLM-13b", {"num_hidden_layers": 40}),
    "baichuan2-7b": ("baichuan", "BaichuanForCausalLM-2-7b", {"vocab_size": 125696, "hidden_size": 120}),
    "baichuan2-13b": (
        "baichuan", "BaichuanForCausalLM-2-13b",
        {"num_hidden_layers": 40, "vocab_size": 125696, "hidden_size": 120},
    ),
    "arcee": ("arcee", "ArceeForCausalLM", {}),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM", {}),
    "ernie4_5-moe": ("ernie4_5-moe", "Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": -1}),
    "minimax-m2": ("minimax-m2", "MiniMaxM2ForCausalLM", {}),
    "dots1": ("dots1", "Dots1ForCausalLM", {"sliding_window": None}),
    "hunyuan-dense": ("hunyuan-dense", "HunYuanDenseV1ForCausalLM", {}),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM", {}),
}  # fmt: skip


@pytest.mark.matrix(take=16)
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
    assert_greedy(ours.greedy(prompts[:1], 64)[0], theirs, prompts[0], limit)


def test_every_architecture_has_its_test() -> None:
    assert {architecture for architecture, _, _ in CASES.values()} | set(NAMES.values()) == set(GGUF_ROWS)
    read = {row.partition("-")[0] for _, row, _ in CASES.values()} | {"LlamaForCausalLM", "MistralForCausalLM"}
    variants = {name for row in GGUF_ROWS.values() for name in row.variants}
    assert variants <= read


# Sizes of whole blocks.
EVEN = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
EXPERTS = EVEN | {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2}
LATENT = EVEN | {
    "num_key_value_heads": 3, "q_lora_rank": 64, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 10,
    "v_head_dim": 64, "moe_intermediate_size": 64, "rope_parameters": YARN, "head_dim": None,
}  # fmt: skip
QUANTIZED: dict[str, tuple[str, str, dict[str, Any], Kind]] = {
    "qwen3moe": ("qwen3moe", "Qwen3MoeForCausalLM", EXPERTS | {"mlp_only_layers": []}, Kind.Q5_1),
    "qwen2moe": (
        "qwen2moe", "Qwen2MoeForCausalLM",
        EXPERTS | CASES["qwen2moe"][2] | {"shared_expert_intermediate_size": 64, "head_dim": None}, Kind.Q8_0,
    ),
    "granitemoe": (
        "granitemoe", "GraniteMoeSharedForCausalLM",
        EVEN | {"intermediate_size": 64, "shared_intermediate_size": 96, "head_dim": None}, Kind.Q4_0,
    ),
    "deepseek2": ("deepseek2", "DeepseekV2ForCausalLM", LATENT, Kind.Q8_0),
    "deepseek2-sigmoid": ("deepseek2", "DeepseekV3ForCausalLM", LATENT, Kind.Q4_1),
    "gptneox": ("gptneox", "GPTNeoXForCausalLM", {"hidden_size": 96, "intermediate_size": 160}, Kind.Q5_0),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"n_embd": 96, "n_head": 3}, Kind.Q8_0),
    "starcoder": ("starcoder", "GPTBigCodeForCausalLM", {"n_embd": 96, "n_head": 3}, Kind.Q4_1),
    "gpt-oss": (
        "gpt-oss", "GptOssForCausalLM", EVEN | {"intermediate_size": 64, "num_attention_heads": 4, "swiglu_limit": 7.0},
        Kind.MXFP4,
    ),
}  # fmt: skip
# Those that need nothing more, each in one of the types that the gguf package writes.
SQUARE = EVEN | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}
KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
PLAIN_ROWS = (
    "phi2", "phi3", "chatglm", "glm4", "command-r", "cohere2", "stablelm", "nemotron", "minicpm", "olmo2", "olmo3",
    "starcoder2", "internlm2", "exaone", "exaone4", "baichuan", "baichuan2-13b", "arcee", "seed_oss", "ernie4_5",
    "mixtral", "phimoe", "jais2", "glm4moe", "olmoe", "minicpm3", "mistral3", "ministral3", "ernie4_5-moe",
    "minimax-m2", "dots1", "hunyuan-dense",
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 6} for name in ("baichuan", "baichuan2-13b")},
    **{name: {"moe_intermediate_size": 64} for name in ("glm4moe", "ernie4_5-moe", "dots1")},
    "minicpm": {"logits_scaling": 96 / 24, "attention_multiplier": 16**-0.5}, "minicpm3": LATENT | {
        "num_attention_heads": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": None,
    },
}  # fmt: skip
QUANTIZED |= {
    name: (*CASES[name][:2], CASES[name][2] | SQUARE | OWN.get(name, {}), KINDS[at % len(KINDS)])
    for at, name in enumerate(PLAIN_ROWS)
}
# Layers with a state, what these read and write in whole blocks.
MAMBA_BLOCKS = EVEN | {"mamba_num_heads": 8, "n_groups": 2, "mamba_head_dim": 20, "ssm_state_size": 24}
QUANTIZED |= {
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM", MAMBA_BLOCKS, Kind.Q8_0),
    "nemotron_h_moe": (
        "nemotron_h_moe", "NemotronHForCausalLM-mixture",
        MAMBA_BLOCKS | {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96}, Kind.Q5_1,
    ),
    "qwen3next": (
        "qwen3next", "Qwen3NextForCausalLM",
        EXPERTS | CASES["qwen3next"][2] | {
            "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_value_head_dim": 24,
        },
        Kind.Q4_0,
    ),
}  # fmt: skip
SMALL = ("_norm", "ffn_gate_inp", "position_embd", "bias", "ssm_conv1d", "ssm_a", "ssm_d")


def _both(name: str, folder: Path) -> tuple[Path, Path]:
    """A file in blocks of the case's type, and one of the numbers that these stand for."""
    architecture, row, changes, kind = QUANTIZED[name]
    save_random(row, folder, **changes)

    def blocks(tensor: str) -> Kind:
        if any(each in tensor for each in SMALL):
            return Kind.F32
        if "attn_v." in tensor:
            return Kind.Q8_0  # as published files keep values in more bits than what lies beside them
        experts_alone = kind is Kind.MXFP4
        return kind if "_exps" in tensor or not experts_alone else Kind.Q8_0

    file = gguf_zoo.write(folder, folder / "blocks.gguf", architecture, blocks)
    return file, gguf_zoo.write(folder, folder / "plain.gguf", architecture, lambda _: Kind.F32, rounded=blocks)


@pytest.mark.matrix("method", take=11)
@pytest.mark.parametrize("method", ["none", "gguf"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_of_a_file_stand_for_their_numbers(name: str, method: str, tmp_path: Path, paged_model: Any) -> None:
    """With and without matrices that stay in blocks; experts and latents are decoded, or stay in MXFP4."""
    print(f"seed {SEED}")
    file, plain = _both(name, tmp_path)
    prompt = random.Random(SEED).choices(range(3, 90), k=35)
    ours = paged_model(str(file), slots=1, quantization=method)
    expected = paged_model(str(plain), slots=1).step([(0, prompt)], all_logits=True)[0]
    # What stays in blocks is multiplied by activations of 16 bits or more.
    limit = 2e-4 if method == "none" else 3e-2
    torch.testing.assert_close(ours.step([(0, prompt)], all_logits=True)[0], expected, atol=limit, rtol=limit)
    if name == "gpt-oss":
        experts = ours.decoder.weights.layers[1].mixture.experts
        assert experts.kind == ("dense" if method == "none" else "mxfp4")


MAMBA = {"mamba_num_heads": 8, "n_groups": 2, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 26}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16, "shared_expert_intermediate_size": 22}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# Of each row what two ranks need; those with matrices in one piece, with norms of heads and with states.
PARTS: dict[str, dict[str, Any]] = {
    "qwen3moe": QUANTIZED["qwen3moe"][2] | HEADS, "gpt-oss": QUANTIZED["gpt-oss"][2] | HEADS,
    "deepseek2": LATENT | HEADS | {"num_key_value_heads": 4}, "nemotron_h": MAMBA, "nemotron_h-biased": MAMBA,
    "nemotron_h_moe": MAMBA, "qwen3next": DELTA | CASES["qwen3next"][2], "phi3": {"hidden_size": 64},
    "gpt2": {"n_embd": 48, "n_head": 4}, "stablelm-parallel": {"hidden_size": 64, "head_dim": None},
    "command-r-qk-norm": CASES["command-r-qk-norm"][2] | {"hidden_size": 64, "head_dim": None}, "olmo2": {},
    "gptneox": {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4},
    "baichuan-13b": {"num_hidden_layers": 40, "hidden_size": 64, "num_key_value_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "whole_experts"),
    [*((name, False) for name in PARTS),
     *((name, True) for name in ("qwen3moe", "gpt-oss", "deepseek2", "nemotron_h_moe", "qwen3next"))],
)  # fmt: skip
def test_ranks_have_their_parts_of_a_file(name: str, whole_experts: bool, tmp_path: Path) -> None:
    """What a rank loads is what it loads of the checkpoint that the file was made of."""
    print(f"seed {SEED}")
    architecture, row, _ = CASES[name]
    common = {} if name == "gpt2" else HEADS | {"intermediate_size": 64}
    save_random(row, tmp_path, **common | PARTS[name])
    file = gguf_zoo.write(tmp_path, tmp_path / "m.gguf", architecture)
    for place in places(2, 1, whole_experts=whole_experts):
        mine, theirs = (_flat(_loaded(str(model), place)) for model in (file, tmp_path))
        assert mine.keys() == theirs.keys()
        for key, tensor in mine.items():
            # Files hold how fast a state fades, and not its logarithm; and 1 + w, not w.
            rounded = key.endswith("a_log") or (name == "qwen3next" and "norm" in key)
            assert torch.equal(tensor, theirs[key]) or (rounded and torch.allclose(tensor, theirs[key], atol=1e-6)), key


@pytest.mark.parametrize("whole_experts", [False, True])
def test_ranks_have_their_parts_of_experts_in_four_bits(whole_experts: bool, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    file, plain = _both("gpt-oss", tmp_path)
    for place in places(2, 1, whole_experts=whole_experts):
        mine, theirs = (_experts_of(str(model), place, "auto") for model in (file, plain))
        assert (mine.kind, theirs.kind) == ("mxfp4", "dense")
        for expert in range(mine.experts):
            pairs = zip(expert_values(mine, expert), expert_values(theirs, expert), strict=True)
            assert all(torch.equal(ours, wanted) for ours, wanted in pairs)


def _experts_of(model: str, place: Place, quantization: str) -> ExpertWeights:
    mixture = _loaded(model, place, quantization).layers[1].mixture
    assert mixture is not None
    return mixture.experts


def _loaded(model: str, place: Place, quantization: str = "none") -> DecoderWeights:
    source = read_source(model)
    cut = Cut(build_spec(source), place)
    return load_weights(source, cut.spec, torch.device("cpu"), torch.float32, quantization, cut=cut)


def _flat(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor within dataclasses and tuples, by its way there."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, tuple):
        return {key: each for at, part in enumerate(value) for key, each in _flat(part, f"{path}.{at}").items()}
    if dataclasses.is_dataclass(value):
        parts = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return {key: each for name, part in parts for key, each in _flat(part, f"{path}.{name}").items()}
    return {}


@pytest.mark.parametrize(
    "name", ["phi3", "phi3-long", "qwen3moe", "stablelm", "gpt2", "starcoder2", "nemotron", "qwen2moe"]
)
def test_transformers_reads_the_files_of_this_test(name: str, tmp_path: Path) -> None:
    """That files are laid out here as others lay them out: transformers brings them back to what it saved."""
    import transformers

    architecture, row, changes = CASES[name]
    theirs = save_random(row, tmp_path, **changes)
    gguf_zoo.write(tmp_path, tmp_path / "m.gguf", architecture)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=theirs.config, dtype=torch.float32
    )
    saved = theirs.state_dict()
    # A product more or less rounds what was added to norms.
    assert all(torch.allclose(tensor, saved[key], atol=1e-6) for key, tensor in read.state_dict().items())
    assert saved.keys() == read.state_dict().keys()


def test_what_a_delta_net_reads_may_lie_together(tmp_path: Path, paged_model: Any) -> None:
    """As the first files of Qwen3-Next have it: queries, keys, values and gates, head by head."""
    theirs = save_random("Qwen3NextForCausalLM", tmp_path, mlp_only_layers=[])
    saved = load_file(tmp_path / "model.safetensors")

    def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in tensors if name.endswith("attn_gate.weight")]:
            layer = name.split(".")[1]
            del tensors[name], tensors[f"blk.{layer}.attn_qkv.weight"]
            tensors[f"blk.{layer}.ssm_in.weight"] = saved[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
        return tensors

    file = gguf_zoo.write(tmp_path, tmp_path / "m.gguf", "qwen3next", change=together)
    prompt = random.Random(SEED).choices(range(3, 90), k=33)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    ours = paged_model(str(file), slots=1).step([(0, prompt)], all_logits=True)[0]
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["mixtral-fused", "chatglm-merged"])
def test_what_other_converters_merge_is_brought_apart(name: str, tmp_path: Path, paged_model: Any) -> None:
    """Gate and up of all experts in one tensor; queries, keys and values in one."""
    architecture, row, changes = CASES[name.partition("-")[0]]
    theirs = save_random(row, tmp_path, **changes)
    merge = gguf_zoo.fused if name == "mixtral-fused" else gguf_zoo.merged
    ours = paged_model(str(gguf_zoo.write(tmp_path, tmp_path / "m.gguf", architecture, change=merge)), slots=1)
    prompt = random.Random(SEED).choices(range(3, 90), k=33)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(ours.step([(0, prompt)], all_logits=True)[0], expected, atol=2e-4, rtol=2e-4)


def test_experts_of_several_types_are_refused(tmp_path: Path) -> None:
    architecture, row, changes, _ = QUANTIZED["gpt-oss"]
    save_random(row, tmp_path, **changes)

    def blocks(tensor: str) -> Kind:
        mixed = Kind.Q8_0 if tensor == "blk.2.ffn_up_exps.weight" else Kind.MXFP4
        return mixed if "_exps.weight" in tensor else Kind.F32

    source = read_source(str(gguf_zoo.write(tmp_path, tmp_path / "m.gguf", architecture, blocks)))
    with pytest.raises(
        ModelError, match=r"blk\.2\.ffn_up_exps\.0\.weight is Q8_0, where experts of the first layer are"
    ):
        load_weights(source, build_spec(source), torch.device("cpu"), torch.float32, "auto")
