"""Heads that draft: how EAGLE-3's configurations and models' own heads are read, and where their tensors lie.

Two conventions are about: config.json of one Llama layer, with `eagle_config` beside it, and `speculators`' with the
layer in `transformer_layer_config`. They count the layers whose states are read differently: the first says whose
output, the other whose input.

Invariants: pure; a setting that changes what is drafted is read or refused by name.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.latent import LATENT_ROWS
from stoker_runtime.models.architectures.llama import LLAMA_ROWS
from stoker_runtime.models.architectures.moe import MOE_ROWS
from stoker_runtime.models.architectures.reading import SLIDING, refuse
from stoker_runtime.models.architectures.row import LAYER_NAMES, Architecture, one
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.draft_heads.spec import HeadSpec, NextSpec
from stoker_runtime.models.spec import ModelSpec

EAGLE3 = "LlamaForCausalLMEagle3"
EAGLE3_NAMES = (EAGLE3, "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
_UNREAD = {
    "norm_before_fc": "states are fused as the model has them",
    "fc_norm": "states are fused as the model has them",
    "quantization_config": "heads are read in 16 or 32 bits",
}

NEXT = "NextN"
"""What the name of a model's own head ends with."""


def _next(row: Architecture) -> Architecture:
    """The row of a model's own layer for the token after the next, beside the model's."""
    own = {"embed_norm": one("enorm.weight"), "hidden_norm": one("hnorm.weight"), "join": one("eh_proj.weight")}
    return replace(
        row,
        top_names={"final_norm": one("layers.0.shared_head.norm.weight")},
        layer_names={**row.layer_names, **own},
        base="",
        layers="layers.",
        # Copies of the model's own ends.
        ignored=r"layers\.0\.(embed_tokens|shared_head\.head)\.weight|layers\.0\.self_attn\.rotary_emb\.inv_freq",
    )


_MODELS = {name: {**LATENT_ROWS, **MOE_ROWS}[name] for name in ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")}
HEAD_ROWS: dict[str, Architecture] = {
    **{f"{name}{NEXT}": _next(row) for name, row in _MODELS.items()},
    EAGLE3: Architecture(
        LLAMA_ROWS["LlamaForCausalLM"].build,
        top_names={
            "embed": one("embed_tokens.weight"),
            "fuse": one("fc.weight"),
            "final_norm": one("norm.weight"),
            "head": one("lm_head.weight"),
        },
        layer_names={**LAYER_NAMES, "hidden_norm": one("hidden_norm.weight")},
        base="",
        layers="layers.",
        renamed=(("model.", ""), ("midlayer.", "layers.0.")),
        ignored=r"[dt]2[td]|(layers\.0\.self_attn\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight",
    ),
}


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is of an EAGLE-3 head, as far as it says so itself."""
    named = any(each in EAGLE3_NAMES for each in config.get("architectures") or ())
    return named or "draft_vocab_size" in config


def read_eagle3(source: ModelSource, target: ModelSpec, *, own_table: bool) -> HeadSpec:
    """The spec of an EAGLE-3 head beside `target`; `own_table`: its checkpoint has an embedding.

    Raises ModelError naming the key that is missing, or that says something else than what is run here.
    """
    config = {**source.config, **(source.config.get("transformer_layer_config") or {})}
    config.update(source.config, architectures=[EAGLE3])
    for key, reason in _UNREAD.items():
        refuse(config, key, reason)
    if SLIDING in (config.get("layer_types") or ()):
        raise ModelError(f"layer_types has {SLIDING}, which heads are not run with.", param="layer_types")
    try:
        row = HEAD_ROWS[EAGLE3]
        spec = row.build({"max_position_embeddings": target.max_position, **config})
        drafted = int(config.get("draft_vocab_size") or spec.vocab)
    except KeyError as error:
        raise ModelError(f"{source.name}: the configuration lacks {error}.", param=str(error.args[0])) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{source.name}: the configuration is not usable: {error}.") from error
    if spec.num_layers != 1:
        raise ModelError(f"num_hidden_layers is {spec.num_layers}; a head has 1.", param="num_hidden_layers")
    known = {field.name: getattr(spec, field.name) for field in fields(ModelSpec)}
    head = HeadSpec(**known, taps=_taps(config, target), state=target.hidden, drafted=drafted, own_table=own_table)
    return replace(head, tie_embeddings=False, norm_first=bool(config.get("norm_before_residual")))


def next_layer(source: ModelSource, target: ModelSpec) -> NextSpec:
    """The spec of the layer that `target`, read from `source`, has for the token after the next.

    Raises ModelError for a model that has none, or one that is not run.
    """
    name, layer = f"{source.name} ({target.architecture})", target.num_layers
    if f"{target.architecture}{NEXT}" not in HEAD_ROWS:
        raise ModelError(f"{name}: its own heads are not run; those of {', '.join(_MODELS)} are.", param="method")
    if target.draft_layers != 1:
        raise ModelError(
            f"{name}: num_nextn_predict_layers is {target.draft_layers}; it must be 1.",
            param="num_nextn_predict_layers",
        )
    if target.checkpoint is not None or source.kind is SourceKind.GGUF:
        raise ModelError(f"{name}: its own head is read in 16 or 32 bits alone, and this checkpoint is quantized.")
    known = {field.name: getattr(target, field.name) for field in fields(ModelSpec)}
    single: dict[str, Any] = {
        "architecture": f"{target.architecture}{NEXT}", "num_layers": 1, "windows": (0,), "unrotated": frozenset(),
        "moe": target.moe and replace(target.moe, layers=frozenset((0,))), "draft_layers": 0, "head_kind": "",
        "tie_embeddings": False, "blocks": {},
    }  # fmt: skip
    within = f"{_MODELS[target.architecture].layers}{layer}."
    head = NextSpec(**{**known, **single}, own_table=False, within=within)
    return replace(head, state=target.hidden, drafted=target.vocab)


def _taps(config: Mapping[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """The layers of the model before which the head reads its residual stream."""
    own = config.get("eagle_config") or {}
    if own.get("use_aux_hidden_state") is False:
        raise ModelError(
            "eagle_config.use_aux_hidden_state is false; heads that read the model's last state alone are not run.",
            param="eagle_config",
        )
    layers, count = target.num_layers, 0
    if own.get(TAPS_KEY):
        taps = tuple(int(layer) + 1 for layer in own[TAPS_KEY])
    elif config.get(TAPS_KEY):
        taps = tuple(int(layer) for layer in config[TAPS_KEY])
    else:
        taps = (2, layers // 2, layers - 3)
    count = sum(not 0 <= layer < layers for layer in taps)
    if count:
        raise ModelError(
            f"the head reads states before layers {', '.join(map(str, taps))}, of which {count} are not among the "
            f"model's {layers}; {TAPS_KEY} says others.",
            param=TAPS_KEY,
        )
    return taps
