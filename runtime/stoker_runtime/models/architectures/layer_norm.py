"""Rows with layer norms: those whose attention and feed-forward read the same stream (Phi, GPT-J, GPT-NeoX, Cohere,
StableLM), those with a feed-forward that has no gate (GPT-2, Nemotron, Jais 2, StarCoder 1 and 2), and Phi-3-small.

Invariants: pure; a setting that changes the result is read or refused.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.reading import every, read_base, read_layer_types, refuse
from stoker_runtime.models.architectures.row import (
    LAYER_NAMES,
    TOP_NAMES,
    UP_ALONE,
    Architecture,
    Names,
    Stored,
    one,
    with_biases,
)
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.layer_specs.sparse_spec import SparseSpec
from stoker_runtime.models.spec import ModelSpec, Norm, QkNorm


def _phi(config: Mapping[str, Any]) -> ModelSpec:
    refuse(config, "qk_layernorm", "no published model norms its queries so")
    return replace(
        read_base(config, eps="layer_norm_eps"),
        norm=Norm.LAYER, norm_bias=True, parallel=True, shared_norm=True, gated=False,
        qkv_bias=True, output_bias=True, ffn_bias=True, head_bias=True,
    )  # fmt: skip


def _neox(config: Mapping[str, Any]) -> ModelSpec:
    older = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config["rotary_pct"]}
    bias = bool(config["attention_bias"])
    return replace(
        read_base({**older, **config}, eps="layer_norm_eps"),
        norm=Norm.LAYER, norm_bias=True, parallel=bool(config["use_parallel_residual"]), gated=False,
        qkv_bias=bias, output_bias=bias, ffn_bias=True,
    )  # fmt: skip


def _cohere(config: Mapping[str, Any]) -> ModelSpec:
    spec, bias = read_base(config, eps="layer_norm_eps"), bool(config.get("attention_bias", False))
    return replace(
        spec,
        rope=replace(spec.rope, interleaved=True),
        norm=Norm.LAYER, parallel=True, shared_norm=True, qkv_bias=bias, output_bias=bias,
        qk_norm=QkNorm.LAYER if config.get("use_qk_norm") else QkNorm.NONE,
        logit_scale=float(config["logit_scale"]),
    )  # fmt: skip


def _cohere2(config: Mapping[str, Any]) -> ModelSpec:
    """Layers that see everything do not rotate."""
    for key, known in (("use_parallel_block", True), ("use_gated_activation", True), ("use_qk_norm", False)):
        if config.get(key, known) != known:
            raise ModelError(f"{key} is {config[key]!r}; of Cohere 2 only {known} is supported.", param=key)
    spec = _cohere(config)
    slides = read_layer_types(config, spec.num_layers, every(int(config["sliding_window_pattern"]), spec.num_layers))
    window = int(config["sliding_window"])
    return replace(
        spec,
        windows=tuple(window if each else 0 for each in slides),
        unrotated=frozenset(layer for layer, each in enumerate(slides) if not each),
    )


def _stablelm(config: Mapping[str, Any]) -> ModelSpec:
    parallel = bool(config.get("use_parallel_residual", False))
    return replace(
        read_base(config, eps="layer_norm_eps"),
        norm=Norm.LAYER, norm_bias=True, parallel=parallel, shared_norm=parallel,
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        qk_norm=QkNorm.LAYER if config.get("qk_layernorm") else QkNorm.NONE,
    )  # fmt: skip


def _nemotron(config: Mapping[str, Any]) -> ModelSpec:
    bias, ffn_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    return replace(
        read_base(config, eps="norm_eps"),
        norm=Norm.LAYER, norm_bias=True, norm_offset=1.0, gated=False,
        qkv_bias=bias, output_bias=bias, ffn_bias=ffn_bias,
    )  # fmt: skip


def _jais2(config: Mapping[str, Any]) -> ModelSpec:
    bias = bool(config["attention_bias"])
    return replace(
        read_base(config, eps="layer_norm_eps"),
        norm=Norm.LAYER, norm_bias=True, gated=False,
        qkv_bias=bias, output_bias=bias, ffn_bias=bool(config["mlp_bias"]),
    )  # fmt: skip


def _starcoder2(config: Mapping[str, Any]) -> ModelSpec:
    spec, bias = read_base(config, eps="norm_epsilon"), bool(config["use_bias"])
    return replace(
        spec,
        norm=Norm.LAYER, norm_bias=True, gated=False, qkv_bias=bias, output_bias=bias, ffn_bias=bias,
        windows=(int(config.get("sliding_window") or 0),) * spec.num_layers,
    )  # fmt: skip


def _spelled_out(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes by the names that others have for those of GPT-2 and its kin."""
    common = {
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "intermediate_size": config.get("n_inner") or 4 * int(config["n_embd"]),
        "max_position_embeddings": config["n_positions"],
        "num_key_value_heads": None,
        "head_dim": None,
    }
    return {**config, **common}


def _gptj(config: Mapping[str, Any]) -> ModelSpec:
    """The first `rotary_dim` values of a head rotate, neighbours together."""
    if not config["rotary_dim"]:
        raise ModelError(
            f"rotary_dim is {config['rotary_dim']!r}; it must say how much of a head rotates.", param="rotary_dim"
        )
    spec = read_base(_spelled_out(config), eps="layer_norm_epsilon", activation="activation_function")
    return replace(
        spec,
        rope=RopeSpec(dim=int(config["rotary_dim"]), interleaved=True),
        norm=Norm.LAYER, norm_bias=True, parallel=True, shared_norm=True, gated=False, ffn_bias=True, head_bias=True,
    )  # fmt: skip


def _gpt2(config: Mapping[str, Any]) -> ModelSpec:
    """Learned positions in the place of a rotation."""
    refuse(config, "scale_attn_by_inverse_layer_idx", "attention is scaled alike in all layers")
    refuse(config, "add_cross_attention", "there is nothing else to attend to")
    if not config.get("scale_attn_weights", True):
        raise ModelError("scale_attn_weights is false, which is not supported.", param="scale_attn_weights")
    return replace(
        read_base(_spelled_out(config), eps="layer_norm_epsilon", activation="activation_function"),
        rope=RopeSpec(dim=0), learned_positions=True,
        norm=Norm.LAYER, norm_bias=True, gated=False, qkv_bias=True, output_bias=True, ffn_bias=True,
    )  # fmt: skip


def _gpt_bigcode(config: Mapping[str, Any]) -> ModelSpec:
    """GPT-2 whose heads share one key and one value, unless each has its own."""
    spec = _gpt2(config)
    return replace(spec, kv_heads=1 if config["multi_query"] else spec.heads)


def _phi3_small(config: Mapping[str, Any]) -> ModelSpec:
    """Scaled for width (muP), with a gelu of bounded values, and attention to blocks in all layers but each n-th."""
    if config["hidden_act"] != "gegelu":
        raise ModelError(f"hidden_act is {config['hidden_act']!r}; of Phi-3-small only gegelu is supported.",
                         param="hidden_act")  # fmt: skip
    stretched = float(config["rope_position_scale"])
    scaling = {"rope_type": "linear", "factor": stretched} if stretched != 1.0 else None
    common = {
        "intermediate_size": config["ff_intermediate_size"],
        "rope_theta": config["rope_embedding_base"],
        "rope_scaling": config.get("rope_scaling") or scaling,
        "hidden_act": "silu",
    }
    spec = read_base({**config, **common}, eps="layer_norm_epsilon")
    scale = float(config["mup_attn_multiplier"]) / spec.head_dim if config["mup_use_scaling"] else 0.0
    return replace(
        spec,
        rope=_by_length(spec.rope, config.get("rope_scaling") or {}), sparse=_sparse(config, spec),
        activation="clamped_gelu", activation_limit=float(config.get("gegelu_limit") or 0.0),
        norm=Norm.LAYER, norm_bias=True, qkv_bias=True, output_bias=True, ffn_bias=True,
        embedding_multiplier=float(config.get("mup_embedding_multiplier") or 1.0), attention_multiplier=scale,
        logit_scale=1.0 / float(config.get("mup_width_multiplier") or 1.0),
        unused_tokens=tuple(int(each) for each in config.get("dummy_token_indices") or ()),
    )  # fmt: skip


def _by_length(rope: RopeSpec, scaling: Mapping[str, Any]) -> RopeSpec:
    """`rope` with the factors of cos and sin that the configuration states for long contexts and for short ones."""
    if rope.kind != "longrope":
        return rope
    long, short = (float(scaling.get(key) or rope.attention_factor) for key in ("long_mscale", "short_mscale"))
    return replace(rope, attention_factor=long, short_attention_factor=short)


def _sparse(config: Mapping[str, Any], spec: ModelSpec) -> SparseSpec | None:
    """The layers that attend to blocks: of each head's columns of them one lies beside the next head's, unless told."""
    period, stride = int(config.get("dense_attention_every_n_layers") or 0), int(config["blocksparse_vert_stride"])
    layers = frozenset(layer for layer in range(spec.num_layers) if not period or (layer + 1) % period)
    block, local = int(config["blocksparse_block_size"]), int(config["blocksparse_num_local_blocks"])
    if block < 16 or block & (block - 1):
        raise ModelError(
            f"blocksparse_block_size is {block}; kernels take powers of two from 16 on.", param="blocksparse_block_size"
        )
    if local < 1 or stride < 1:
        raise ModelError(
            f"blocksparse_num_local_blocks is {local} and blocksparse_vert_stride {stride}; both must be positive.",
            param="blocksparse_num_local_blocks" if local < 1 else "blocksparse_vert_stride",
        )
    step = 0 if config.get("blocksparse_homo_head_pattern") else max(1, stride // spec.heads)
    return SparseSpec(layers, block, local, stride, step) if layers else None


_PHI_TOP = {
    **TOP_NAMES,
    "final_norm": one("model.final_layernorm.weight", "output_norm.weight"),
    "final_norm_bias": one("model.final_layernorm.bias", "output_norm.bias"),
}
_PHI_NAMES = LAYER_NAMES | with_biases(
    {
        "output": ("self_attn.dense", "attn_output"),
        "gate_up": ("mlp.fc1", "ffn_up"),
        "down": ("mlp.fc2", "ffn_down"),
    }
)
_PHI3_SMALL_NAMES = {
    **LAYER_NAMES,
    **with_biases({"output": ("self_attn.dense", "attn_output")}),
    "qkv": one("self_attn.query_key_value.weight", stored=Stored.GROUPED),
    "qkv_bias": one("self_attn.query_key_value.bias", stored=Stored.GROUPED),
    "gate_up": one("mlp.up_proj.weight", stored=Stored.PAIRED),
    "gate_up_bias": one("mlp.up_proj.bias", stored=Stored.PAIRED),
}
_NEOX_TOP = {
    "embed": one("gpt_neox.embed_in.weight", "token_embd.weight"),
    "final_norm": one("gpt_neox.final_layer_norm.weight", "output_norm.weight"),
    "final_norm_bias": one("gpt_neox.final_layer_norm.bias", "output_norm.bias"),
    "head": one("embed_out.weight", "output.weight"),
}
_NEOX_NAMES = {
    **LAYER_NAMES,
    **with_biases({
        "output": ("attention.dense", "attn_output"),
        "gate_up": ("mlp.dense_h_to_4h", "ffn_up"),
        "down": ("mlp.dense_4h_to_h", "ffn_down"),
    }),
    "qkv": one("attention.query_key_value.weight", "attn_qkv.weight", stored=Stored.GROUPED),
    "qkv_bias": one("attention.query_key_value.bias", "attn_qkv.bias", stored=Stored.GROUPED),
}  # fmt: skip
_STABLELM_NAMES = {
    **LAYER_NAMES,
    "q_norm": one("self_attn.q_layernorm.norms.{head}.weight", "attn_q_norm.weight", stored=Stored.BY_HEAD),
    "k_norm": one("self_attn.k_layernorm.norms.{head}.weight", "attn_k_norm.weight", stored=Stored.BY_HEAD),
}
_STARCODER2_NAMES = LAYER_NAMES | with_biases({"gate_up": ("mlp.c_fc", "ffn_up"), "down": ("mlp.c_proj", "ffn_down")})
_GPT2_TOP = {
    "embed": one("transformer.wte.weight", "token_embd.weight"),
    "positions": one("transformer.wpe.weight", "position_embd.weight"),
    "final_norm": one("transformer.ln_f.weight", "output_norm.weight"),
    "final_norm_bias": one("transformer.ln_f.bias", "output_norm.bias"),
    "head": one("lm_head.weight", "output.weight"),
}
_GPT2_LINEARS = {
    "qkv": ("attn.c_attn", "attn_qkv"),
    "output": ("attn.c_proj", "attn_output"),
    "gate_up": ("mlp.c_fc", "ffn_up"),
    "down": ("mlp.c_proj", "ffn_down"),
}
_GPT2_NAMES = {
    **with_biases({"input_norm": ("ln_1", "attn_norm"), "ffn_norm": ("ln_2", "ffn_norm")}),
    **with_biases(_GPT2_LINEARS),
    **{name: one(f"{hf}.weight", f"{gguf}.weight", Stored.COLUMNS) for name, (hf, gguf) in _GPT2_LINEARS.items()},
}
# How its files, and those of its kin, begin names; what masks is no weight.
_GPT2_FILES: dict[str, Any] = {
    "base": "transformer.", "layers": "transformer.h.", "ignored": r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"
}  # fmt: skip
_GPT_BIGCODE_NAMES = {
    **_GPT2_NAMES,
    **with_biases({name: _GPT2_LINEARS[name] for name in ("output", "gate_up", "down")}),
    "qkv": one("attn.c_attn.weight", "attn_qkv.weight", Stored.GROUPED),
    "qkv_bias": one("attn.c_attn.bias", "attn_qkv.bias", Stored.GROUPED),
}
_GPTJ_NAMES = {
    **with_biases(
        {"input_norm": ("ln_1", "attn_norm"), "gate_up": ("mlp.fc_in", "ffn_up"), "down": ("mlp.fc_out", "ffn_down")}
    ),
    "qkv": Names(tuple(f"attn.{each}_proj.weight" for each in "qkv")),
    "output": one("attn.out_proj.weight"),
}
_COHERE_DEFAULTS = {
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "layer_norm_eps": 1e-5,
}

LAYER_NORM_ROWS: dict[str, Architecture] = {
    "PhiForCausalLM": Architecture(
        _phi,
        {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"}
        | {"partial_rotary_factor": 0.5},
        top_names=_PHI_TOP,
        layer_names=_PHI_NAMES,
    ),
    "Phi3SmallForCausalLM": Architecture(
        _phi3_small,
        {"max_position_embeddings": 8192, "layer_norm_epsilon": 1e-5, "hidden_act": "gegelu", "gegelu_limit": 20.0}
        | {"rope_embedding_base": 1e6, "rope_position_scale": 1.0, "tie_word_embeddings": True}
        | {"mup_use_scaling": True, "mup_attn_multiplier": 1.0, "mup_embedding_multiplier": 10.0}
        | {"mup_width_multiplier": 8.0, "dense_attention_every_n_layers": 2, "blocksparse_block_size": 64}
        | {"blocksparse_num_local_blocks": 16, "blocksparse_vert_stride": 8},
        top_names=_PHI_TOP,
        layer_names=_PHI3_SMALL_NAMES,
        ignored=r"model\.layers\.\d+\.self_attn\.(rotary_emb\.inv_freq|_blocksparse_layer\..*)",
    ),
    "GPTNeoXForCausalLM": Architecture(
        _neox,
        {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.25}
        | {"use_parallel_residual": True, "attention_bias": True},
        top_names=_NEOX_TOP,
        layer_names=_NEOX_NAMES,
        base="gpt_neox.",
        layers="gpt_neox.layers.",
        ignored=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    ),
    "CohereForCausalLM": Architecture(_cohere, _COHERE_DEFAULTS | {"rope_theta": 500000.0}),
    "Cohere2ForCausalLM": Architecture(
        _cohere2, _COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4}
    ),
    "StableLmForCausalLM": Architecture(
        _stablelm,
        {"max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        layer_names=_STABLELM_NAMES,
    ),
    "NemotronForCausalLM": Architecture(
        _nemotron,
        {"max_position_embeddings": 4096, "norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        layer_names={**LAYER_NAMES, **UP_ALONE},
    ),
    "Jais2ForCausalLM": Architecture(
        _jais2,
        {"max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "hidden_act": "relu2"}
        | {"attention_bias": True, "mlp_bias": True},
        layer_names={**LAYER_NAMES, **UP_ALONE},
    ),
    "Starcoder2ForCausalLM": Architecture(
        _starcoder2,
        {"max_position_embeddings": 4096, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "use_bias": True}
        | {"tie_word_embeddings": True, "num_key_value_heads": 2},
        layer_names=_STARCODER2_NAMES,
    ),
    "GPTJForCausalLM": Architecture(
        _gptj,
        {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "n_positions": 2048, "rotary_dim": 64},
        top_names={**_GPT2_TOP, "head_bias": one("lm_head.bias")},
        layer_names=_GPTJ_NAMES,
        **_GPT2_FILES,
    ),
    "GPT2LMHeadModel": Architecture(
        _gpt2,
        {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True}
        | {"n_positions": 1024},
        top_names=_GPT2_TOP,
        layer_names=_GPT2_NAMES,
        **_GPT2_FILES,
    ),
    "GPTBigCodeForCausalLM": Architecture(
        _gpt_bigcode,
        {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": True}
        | {"n_positions": 1024, "multi_query": True},
        top_names=_GPT2_TOP,
        layer_names=_GPT_BIGCODE_NAMES,
        **_GPT2_FILES,
    ),
}
