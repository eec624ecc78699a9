"""Rows of decoders whose layers keep, in part, a state in place of a cache: Nemotron-H, Granite 4, Qwen3-Next
and Qwen3.5.

Invariants: pure; a setting that changes the result is read or refused. What a state is,
`layer_specs/state_spec.py` says.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.llama import SEEING, granite, text_of
from stoker_runtime.models.architectures.moe import (
    GGUF_CORRECTION,
    GGUF_DOWN,
    GGUF_GATE_UP,
    GGUF_ROUTER,
    GGUF_SHARED,
    GGUF_SHARED_DOWN,
    GRANITE_MOE_NAMES,
    QWEN2_MOE_NAMES,
    corrected_mixture,
    mixture,
    qwen_sparse_layers,
)
from stoker_runtime.models.architectures.reading import FULL, read_activation, read_base, refuse
from stoker_runtime.models.architectures.row import LAYER_NAMES, POST_ATTENTION, Architecture, Names, Stored, one
from stoker_runtime.models.layer_specs.state_spec import Mixer, StateSpec
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.spec import ModelSpec, QkNorm

LINEAR = "linear_attention"
# What a block of Nemotron-H is: by the letter of a pattern, or by a list's words.
BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", LINEAR: "mamba", FULL: "attention"}
MIXERS = {"mamba": Mixer.MAMBA2, "attention": Mixer.ATTENTION, "mlp": Mixer.NONE, "moe": Mixer.NONE}


def _nemotron_h(config: Mapping[str, Any]) -> ModelSpec:
    """Each block is one thing: Mamba-2, attention that does not rotate, a feed-forward without a gate, or a mixture of
    such.
    """
    blocks = _blocks(config)
    refuse(config, "attention_bias", "its attention has no biases")
    refuse(config, "sliding_window", "its attention sees everything")
    refuse(config, "residual_in_fp32", "the residual stream is of the model's own type")
    _check_steps(config)
    head_dim = config.get("head_dim") or config.get("attention_head_dim") or 128
    sizes = {**config, "num_hidden_layers": len(blocks), "head_dim": head_dim}
    bias = bool(config.get("mlp_bias", False))
    spec = read_base(sizes, eps="layer_norm_epsilon", activation="mlp_hidden_act")
    state = StateSpec(
        kind=Mixer.MAMBA2,
        mixers=tuple(MIXERS[each] for each in blocks),
        heads=int(config["mamba_num_heads"]),
        head_dim=int(config["mamba_head_dim"]),
        size=int(config["ssm_state_size"]),
        groups=int(config["n_groups"]),
        taps=int(config["conv_kernel"]),
        unfed=frozenset(layer for layer, each in enumerate(blocks) if MIXERS[each] is not Mixer.NONE),
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", False)),
    )
    moe = _ungated_mixture(sizes, blocks) if "moe" in blocks else None
    unrotated = frozenset(range(len(blocks)))
    return _checked(
        replace(spec, gated=False, ffn_bias=bias, unrotated=unrotated, recurrent=state, moe=moe), "mamba"
    )


def _ungated_mixture(config: Mapping[str, Any], blocks: list[str]) -> MoeSpec:
    """Nemotron 3's: experts as its feed-forwards, chosen as DeepSeek's, beside one for every token."""
    refuse(config, "moe_latent_size", "its experts read what the layer reads")
    refuse(config, "mlp_bias", "experts without a gate have no biases")
    if read_activation(config, "mlp_hidden_act") != "relu2":
        raise ModelError(
            f"mlp_hidden_act is {config['mlp_hidden_act']!r}; experts without a gate have relu2.",
            param="mlp_hidden_act",
        )
    shared = int(config.get("n_shared_experts") or 0)
    if shared > 1:
        raise ModelError(
            f"n_shared_experts is {shared}, which is not supported: one expert is shared, or none.",
            param="n_shared_experts",
        )
    return corrected_mixture(
        config,
        layers=frozenset(layer for layer, each in enumerate(blocks) if each == "moe"),
        shared_ffn=shared * int(config["moe_shared_expert_intermediate_size"]),
    )


def _blocks(config: Mapping[str, Any]) -> list[str]:
    """What each layer is, in the words of `MIXERS`."""
    given = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ""
    key = "layers_block_type" if config.get("layers_block_type") else "hybrid_override_pattern"
    found = [BLOCKS.get(each, each) for each in given]
    for each in found:
        if each not in MIXERS:
            raise ModelError(f"{key}: {each!r} blocks are not supported; known: {', '.join(MIXERS)}.", param=key)
    if not found:
        raise ModelError("hybrid_override_pattern says of no layer what it is.", param="hybrid_override_pattern")
    return found


def _check_steps(config: Mapping[str, Any]) -> None:
    """Raises ModelError for steps of time that are cut off, or Mamba-2 with another activation."""
    given = config.get("time_step_limit") or (0.0, "inf")
    # JSON has no infinity: some writers say it so.
    least, most = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in given)
    if least > 0.0 or most != float("inf"):
        raise ModelError(f"time_step_limit is {[least, most]}, which is not supported.", param="time_step_limit")
    if read_activation(config, "mamba_hidden_act") != "silu":
        raise ModelError(
            f"mamba_hidden_act is {config['mamba_hidden_act']!r}; only silu is supported.", param="mamba_hidden_act"
        )


def _granite_hybrid(config: Mapping[str, Any]) -> ModelSpec:
    """Granite 4: Mamba-2 or attention, behind either a mixture beside an expert for all, or that one alone; Granite's
    multipliers. Attention rotates only where the configuration says so, and small models have nothing but attention.
    """
    key = "layers_block_type" if config.get("layers_block_type") else "layer_types"
    kinds = [BLOCKS.get(str(each), str(each)) for each in config.get(key) or ()]
    count = int(config["num_hidden_layers"])
    unknown = next((each for each in kinds if each not in ("mamba", "attention")), None)
    if unknown is not None or len(kinds) != count:
        found = "all known" if unknown is None else f"with {unknown!r}"
        raise ModelError(
            f"{key} has {len(kinds)} entries for {count} layers, {found}; it names mamba or attention for each.",
            param=key,
        )
    rotation = config.get("position_embedding_type")
    if rotation not in (None, "nope", "rope"):
        raise ModelError(
            f"position_embedding_type is {rotation!r}, which is not supported; known are rope and nope.",
            param="position_embedding_type",
        )
    _check_steps({**config, "mamba_hidden_act": config.get("hidden_act")})
    shared = int(config["shared_intermediate_size"])
    spec = granite({**config, "intermediate_size": shared})
    if int(config.get("num_local_experts") or 0):
        spec = replace(spec, moe=mixture(config, "intermediate_size", renormalize=True, shared_ffn=shared))
    spec = replace(spec, unrotated=frozenset() if rotation == "rope" else frozenset(range(count)))
    if "mamba" not in kinds:
        return spec
    heads = int(config["mamba_n_heads"])
    inner = int(config["mamba_expand"]) * spec.hidden
    given = config.get("mamba_d_head", "auto")
    head_dim = inner // heads if given == "auto" else int(given)
    if heads * head_dim != inner:
        raise ModelError(
            f"mamba_n_heads {heads} of mamba_d_head {head_dim} are not the {inner} that mamba_expand makes of "
            "hidden_size.",
            param="mamba_d_head",
        )
    state = StateSpec(
        kind=Mixer.MAMBA2,
        mixers=tuple(MIXERS[each] for each in kinds),
        heads=heads,
        head_dim=head_dim,
        size=int(config["mamba_d_state"]),
        groups=int(config["mamba_n_groups"]),
        taps=int(config["mamba_d_conv"]),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
    )
    return _checked(replace(spec, recurrent=state), "mamba")


def _qwen3_next(config: Mapping[str, Any]) -> ModelSpec:
    """Delta nets and gated attention, and a mixture behind either."""
    moe = mixture(
        config,
        "moe_intermediate_size",
        layers=qwen_sparse_layers(config),
        renormalize=bool(config.get("norm_topk_prob", True)),
        shared_ffn=int(config["shared_expert_intermediate_size"]),
        shared_gate=True,
    )
    return replace(_delta_nets(config), moe=moe)


def _qwen3_5(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen3-Next's layers with a feed-forward, of which checkpoints have each projection in a tensor of its own."""
    config = text_of(config)
    if not config.get("attn_output_gate", True):
        raise ModelError("attn_output_gate is false, which is not supported: its attention has a gate.",
                         param="attn_output_gate")  # fmt: skip
    return _delta_nets(config)


def _qwen3_5_moe(config: Mapping[str, Any]) -> ModelSpec:
    """The same with a mixture behind each layer, whose experts' shares sum to 1."""
    text = text_of(config)
    # No layer has another feed-forward.
    spec = _qwen3_5({**config, "text_config": {**text, "intermediate_size": text["moe_intermediate_size"]}})
    moe = mixture(
        text,
        "moe_intermediate_size",
        renormalize=True,
        shared_ffn=int(text["shared_expert_intermediate_size"]),
        shared_gate=True,
    )
    return replace(spec, moe=moe)


def _delta_nets(config: Mapping[str, Any]) -> ModelSpec:
    """Delta nets, and attention with a gate in each `full_attention_interval`-th layer; most norms are 1 + w."""
    refuse(config, "attention_bias", "its attention has no biases")
    count, period = int(config["num_hidden_layers"]), int(config.get("full_attention_interval") or 4)
    default = [LINEAR if (layer + 1) % period else FULL for layer in range(count)]
    kinds = config.get("layer_types") or default
    unknown = next((each for each in kinds if each not in (LINEAR, FULL)), None)
    if unknown is not None or len(kinds) != count:
        raise ModelError(
            f"layer_types has {len(kinds)} entries for {count} layers, "
            f"{'all known' if unknown is None else f'with {unknown!r}'}; it names {LINEAR} or {FULL} for each.",
            param="layer_types",
        )
    state = StateSpec(
        kind=Mixer.GATED_DELTA,
        mixers=tuple(Mixer.ATTENTION if each == FULL else Mixer.GATED_DELTA for each in kinds),
        heads=int(config["linear_num_value_heads"]),
        head_dim=int(config["linear_value_head_dim"]),
        size=int(config["linear_key_head_dim"]),
        groups=int(config["linear_num_key_heads"]),
        taps=int(config["linear_conv_kernel_dim"]),
    )
    spec = replace(read_base(config), norm_offset=1.0, qk_norm=QkNorm.HEAD, attention_gate=True)
    return _checked(replace(spec, recurrent=state), LINEAR)


def _checked(spec: ModelSpec, name: str) -> ModelSpec:
    """`spec`, of which heads share evenly, and which has layers of both kinds. Raises ModelError."""
    state = spec.recurrent
    assert state is not None, "rows of this table have layers with a state"
    if state.heads % state.groups or state.taps < 2:
        raise ModelError(
            f"{state.heads} heads of layers with a state cannot share {state.groups} groups, over {state.taps} tokens."
        )
    if not state.layers or not spec.attending:
        raise ModelError(f"a model needs layers of {name} and of attention; one of them is missing.")
    return spec


_STATE = {
    "conv": one("mixer.conv1d.weight", "ssm_conv1d.weight"),
    "conv_bias": one("mixer.conv1d.bias", "ssm_conv1d.bias"),
    "a_log": one("mixer.A_log", "ssm_a"),
    "skip": one("mixer.D", "ssm_d"),
    "dt_bias": one("mixer.dt_bias", "ssm_dt.bias"),
    "state_norm": one("mixer.norm.weight", "ssm_norm.weight"),
    "state_in": one("mixer.in_proj.weight", "ssm_in.weight"),
    "state_in_bias": one("mixer.in_proj.bias", "ssm_in.bias"),
    "state_out": one("mixer.out_proj.weight", "ssm_out.weight"),
    "state_out_bias": one("mixer.out_proj.bias", "ssm_out.bias"),
}
_NEMOTRON_H_NAMES = {
    "input_norm": one("norm.weight", "attn_norm.weight"),
    "qkv": Names(tuple(f"mixer.{each}_proj.weight" for each in "qkv"), LAYER_NAMES["qkv"].gguf),
    "output": one("mixer.o_proj.weight", "attn_output.weight"),
    **_STATE,
    "gate_up": one("mixer.up_proj.weight", "ffn_up.weight"),
    "gate_up_bias": one("mixer.up_proj.bias", "ffn_up.bias"),
    "down": one("mixer.down_proj.weight", "ffn_down.weight"),
    "down_bias": one("mixer.down_proj.bias", "ffn_down.bias"),
    "router": one("mixer.gate.weight", GGUF_ROUTER),
    "correction_bias": one("mixer.gate.e_score_correction_bias", GGUF_CORRECTION),
    "experts_gate_up": Names(("mixer.experts.{expert}.up_proj.weight",), GGUF_GATE_UP[1:], Stored.BY_EXPERT),
    "experts_down": Names(("mixer.experts.{expert}.down_proj.weight",), GGUF_DOWN, Stored.BY_EXPERT),
    "shared_gate_up": Names(("mixer.shared_experts.up_proj.weight",), GGUF_SHARED[1:]),
    "shared_down": one("mixer.shared_experts.down_proj.weight", GGUF_SHARED_DOWN),
}
_NEMOTRON_H_TOP = {
    "embed": one("backbone.embeddings.weight", "token_embd.weight"),
    "final_norm": one("backbone.norm_f.weight", "output_norm.weight"),
    "head": one("lm_head.weight", "output.weight"),
}
_GRANITE_HYBRID_NAMES = {
    **GRANITE_MOE_NAMES,
    **{field: replace(each, hf=(each.hf[0].replace("mixer.", "mamba."),)) for field, each in _STATE.items()},
    # Without a mixture what is shared is the feed-forward.
    "gate_up": replace(GRANITE_MOE_NAMES["shared_gate_up"], gguf=LAYER_NAMES["gate_up"].gguf),
    "down": replace(GRANITE_MOE_NAMES["shared_down"], gguf=LAYER_NAMES["down"].gguf),
}
_GATED_QKV = replace(LAYER_NAMES["qkv"], stored=Stored.GROUPED, gguf_stored=Stored.GROUPED)
_QWEN3_NEXT_NAMES = {
    **QWEN2_MOE_NAMES,
    "qkv": _GATED_QKV,
    "ffn_norm": POST_ATTENTION,
    **{
        field: replace(each, hf=(each.hf[0].replace("mixer.", "linear_attn."),)) for field, each in _STATE.items()
    },
    "state_in": Names(
        ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
        ("ssm_in.weight", "ssm_ba.weight"),
        Stored.GROUPED,
        Stored.GROUPED,
    ),
    "state_in_alone": one("linear_attn.in_proj_qkvz.weight", stored=Stored.GROUPED),
    "state_gates": one("linear_attn.in_proj_ba.weight", stored=Stored.GROUPED),
}
_QWEN3_5_NAMES = {
    **_QWEN3_NEXT_NAMES,
    **{
        field: Names(tuple(f"linear_attn.in_proj_{each}.weight" for each in parts))
        for field, parts in {
            "state_in": ("qkv", "z", "b", "a"),
            "state_in_alone": ("qkv", "z"),
            "state_gates": ("b", "a"),
        }.items()
    },
    # As published, and as transformers saves what sees; its model of text alone it saves expert by expert.
    "experts_gate_up_stacked": one("mlp.experts.gate_up_proj"),
    "experts_down_stacked": one("mlp.experts.down_proj"),
}
# Beside what sees are layers that only draft.
_QWEN3_5_SEEING = SEEING | {"ignored": r"(visual|mtp)\..*"}
_QWEN_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4
}  # fmt: skip

HYBRID_ROWS: dict[str, Architecture] = {
    "NemotronHForCausalLM": Architecture(
        _nemotron_h,
        {"layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
        | {"num_key_value_heads": 8, "n_groups": 8, "conv_kernel": 4, "max_position_embeddings": 4096}
        | {"n_shared_experts": 1},
        top_names=_NEMOTRON_H_TOP,
        layer_names=_NEMOTRON_H_NAMES,
        base="backbone.",
        modules="model.",
        layers="backbone.layers.",
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        _granite_hybrid,
        {"max_position_embeddings": 2048, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
        | {"attention_multiplier": 1.0, "logits_scaling": 1.0, "shared_intermediate_size": 1024}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "mamba_n_heads": 128, "mamba_n_groups": 1}
        | {"mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True}
        | {"mamba_proj_bias": False},
        layer_names=_GRANITE_HYBRID_NAMES,
    ),
    "Qwen3NextForCausalLM": Architecture(
        _qwen3_next,
        _QWEN_DEFAULTS,
        layer_names=_QWEN3_NEXT_NAMES,
        # Layers that only draft.
        ignored=r"mtp\..*",
    ),
    **{
        f"{name}For{task}": Architecture(build, _QWEN_DEFAULTS, layer_names=_QWEN3_5_NAMES, **_QWEN3_5_SEEING)
        for name, build in (("Qwen3_5", _qwen3_5), ("Qwen3_5Moe", _qwen3_5_moe))
        for task in ("CausalLM", "ConditionalGeneration")
    },
}
