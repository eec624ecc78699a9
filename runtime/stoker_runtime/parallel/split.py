"""How a model is cut into ranks: the spec of each rank's part, and what cannot be cut so.

Matrices that make heads or feed-forward units are cut by rows, those that read them by columns, so that each layer
sums over the ranks twice; embedding and head by rows of the vocabulary. Key-value heads, and groups of heads with a
state, that are fewer than the ranks are held by several, and latents, which all heads read, by all.

Invariants: torch-free. Every parameter of a spec has an entry in `SPLITS` (`windows.py`); a model, or a setting, that
is not known to be cut rightly is an error that names it and the sizes that work.
Knows nothing of files and of what is exchanged, nor of how experts are stored (`mixture.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace

from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.models.architectures import ARCHITECTURES
from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.layer_specs.state_spec import Mixer, StateSpec
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.parameter import BLOCK, QUANTIZED, Parameter, Role
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.quantization.integer_checkpoint import IntegerCheckpoint
from stoker_runtime.models.quantization.quantized_checkpoint import parts_of
from stoker_runtime.models.spec import ModelSpec, Part
from stoker_runtime.parallel import mixture
from stoker_runtime.parallel.mixture import check_whole_experts, part_of
from stoker_runtime.parallel.place import Place
from stoker_runtime.parallel.windows import (
    OF_EXPERTS,
    SPLITS,
    column_window,
    field_of,
    held_once,
    kv_heads,
    row_pieces,
)

MOST_TENSORS = 64

# Fields of a spec that a rank's part changes, and those that mean the same of it.
CUT_FIELDS = {
    "num_layers", "heads", "kv_heads", "ffn", "windows", "unrotated", "sparse", "slopes", "dense_parameters", "part",
    "moe", "recurrent", "mixed",
}  # fmt: skip
SAME_FIELDS = {
    "architecture", "hidden", "head_dim", "vocab", "eps", "rope", "activation", "max_position", "tie_embeddings",
    "qkv_bias", "output_bias", "ffn_bias", "head_bias", "gated", "norm", "norm_bias", "norm_offset", "pre_norms",
    "post_norms", "parallel", "shared_norm", "qk_norm", "local_rope", "learned_positions", "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "attention_softcap", "logit_scale", "logit_softcap", "dtype",
    "eos_token_ids", "checkpoint", "sinks", "draft_layers", "latent", "head_kind", "attention_gate",
    "embedding_norm", "normed_head", "activation_limit", "unused_tokens", "requantized",
}  # fmt: skip


def split_spec(spec: ModelSpec, place: Place) -> ModelSpec:
    """The spec of the part of `spec` that the rank at `place` has. Raises ConfigError where it cannot be cut so."""
    check_split(spec, place)
    if place.world == 1:
        return spec
    layers = place.layers(spec.num_layers)
    dense = (whole_name(name, -layers.start) for name in spec.dense_parameters if layer_of(name) in layers)
    mixed = {whole_name(name, -layers.start): each for name, each in spec.mixed.items() if layer_of(name) in layers}
    part = Part(
        tensor=place.tensor,
        tensors=place.tensors,
        begins=place.is_first,
        ends=place.is_last,
        step_parameters=spec.active_parameters // place.world,
    )
    own = spec.of_layers(layers)
    heads = place.units(spec.heads)
    return replace(
        own,
        heads=len(heads),
        kv_heads=len(kv_heads(spec, place)),
        ffn=spec.ffn // place.tensors,
        dense_parameters=frozenset(dense),
        mixed=mixed,
        part=part,
        moe=own.moe and part_of(own.moe, place),
        slopes=spec.slopes[heads.start : heads.stop],
        sparse=own.sparse and replace(own.sparse, first_head=heads.start),
        recurrent=own.recurrent and _state_part(spec, own.recurrent, place),
    )


def _state_part(spec: ModelSpec, own: StateSpec, place: Place) -> StateSpec:
    """A rank's heads with a state, and their groups, of its layers `own`."""
    stages = (replace(place, rank=stage * place.tensors) for stage in range(place.stages))
    mixers = spec.recurrent.mixers if spec.recurrent is not None else ()
    layers = ([mixers[layer] for layer in stage.layers(spec.num_layers)].count(own.kind) for stage in stages)
    return replace(
        own,
        heads=own.heads // place.tensors,
        groups=len(held_once(own.groups, place)),
        sharing=max(place.tensors // own.groups, 1),
        most_layers=max(layers),
    )


def layer_of(parameter: str) -> int:
    """The layer of `layers.3.qkv`; -1 for a tensor of no layer."""
    return int(parameter.split(".")[1]) if parameter.startswith("layers.") else -1


def whole_name(parameter: str, first_layer: int) -> str:
    """The name in the whole model of a rank's parameter, whose layers are counted from `first_layer`."""
    if not parameter.startswith("layers."):
        return parameter
    return f"layers.{layer_of(parameter) + first_layer}.{field_of(parameter)}"


def check_split(spec: ModelSpec, place: Place) -> None:
    """Raises ConfigError, with the sizes that work, or ModelError for what is not known to be cut rightly."""
    if place.stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {place.stages}, but the model has {spec.num_layers} layers; "
            f"set --pipeline-parallel-size to {spec.num_layers} or less.",
            param="pipeline_parallel_size",
        )
    check_whole_experts(spec, place)
    if place.world > 1:
        refuse_unknown(spec, place.tensors)
    if place.tensors == 1:
        return
    if any(isinstance(each, IntegerCheckpoint) and each.scheme.order for each in parts_of(spec.checkpoint)):
        assert spec.checkpoint is not None, "an order is a checkpoint's"
        raise ConfigError(
            f"tensor_parallel_size is {place.tensors}, but the checkpoint ({spec.checkpoint.method}) orders columns by "
            "activation (act-order), so its groups cannot be cut; use a checkpoint without act-order, or "
            "--pipeline-parallel-size.",
            param="tensor_parallel_size",
        )
    problem = next(problems(spec, place), None)
    if problem is not None:
        sizes = (Place(0, size, 1, place.whole_experts) for size in range(1, MOST_TENSORS + 1))
        good = [str(each.tensors) for each in sizes if next(problems(spec, each), None) is None]
        raise ConfigError(
            f"tensor_parallel_size is {place.tensors}, but {problem}; sizes that work for this model: "
            f"{', '.join(good)}.",
            param="tensor_parallel_size",
        )


def refuse_unknown(spec: ModelSpec, tensors: int) -> None:
    """Raises ModelError for a parameter or a setting of which this module does not know how it is cut."""
    unknown = {field_of(each.name) for each in spec.parameters()} - SPLITS.keys()
    # What is empty or off changes nothing; a field without a default is one that every model has.
    given = {each.name for each in fields(spec) if each.default is MISSING or getattr(spec, each.name) != each.default}
    given = {name for name in given if getattr(spec, name) not in (None, False, {}, ())}
    unknown |= given - CUT_FIELDS - SAME_FIELDS
    known = mixture.CUT_FIELDS | mixture.SAME_FIELDS
    unknown |= {each.name for each in fields(MoeSpec)} - known if spec.moe is not None else set()
    if unknown:
        setting = "tensor_parallel_size" if tensors > 1 else "pipeline_parallel_size"
        raise ModelError(
            f"{spec.architecture} cannot be cut so yet, because of its {', '.join(sorted(unknown))}; run it with "
            f"--{setting.replace('_', '-')} 1.",
            param=setting,
        )


def unlike_parameters(spec: ModelSpec) -> list[Parameter]:
    """Of all layers' parameters one of each field, kind and scheme, those of its pieces too; a scheme a piece."""
    layers = (spec.layer_parameters(layer) for layer in range(spec.num_layers))
    found: dict[tuple[object, ...], Parameter] = {}
    for parameter in (each for layer in layers for each in layer):
        pieces = spec.mixed.get(parameter.name, ())
        # A matrix whose pieces rest in a scheme of all is cut where each piece's own can be.
        own = [replace(parameter, kind=each.kind, scheme=each.scheme) for each in pieces] if len(pieces) > 1 else []
        latent = pieces if parameter.role is Role.LATENT else ()
        found |= {(field_of(each.name), each.kind, each.scheme, latent): each for each in own or [parameter]}
    return list(found.values())


def problems(spec: ModelSpec, place: Place) -> Iterator[str]:
    """Why the matrices of `spec` cannot be cut into as many parts as `place` has."""
    tensors = place.tensors
    if spec.heads % tensors:
        yield f"num_attention_heads is {spec.heads}"
        return
    if spec.kv_heads % tensors and tensors % spec.kv_heads:
        yield f"num_key_value_heads is {spec.kv_heads}, neither a multiple nor a divisor of it"
        return
    if spec.has_dense_layer and spec.ffn % tensors:
        yield f"intermediate_size is {spec.ffn}"
        return
    if spec.recurrent is not None and (problem := _state_problem(spec.recurrent, tensors)):
        yield problem
        return
    if spec.moe is not None:
        yield from mixture.mixture_problems(spec.moe, tensors, whole_experts=place.whole_experts)
    part = replace(place, rank=0, stages=1)
    for parameter in unlike_parameters(spec):
        if SPLITS[field_of(parameter.name)] in OF_EXPERTS and place.whole_experts:
            continue
        latent = spec.checkpoint_of(parameter.name) if parameter.role is Role.LATENT else None
        if isinstance(latent, Fp8Checkpoint):
            parameter = replace(parameter, kind=latent.kind)  # until it is loaded
        quantized = parameter.role in (*QUANTIZED, Role.LATENT) and parameter.kind not in ("", "dense")
        if quantized and (problem := _quantized_problem(spec, part, parameter)) is not None:
            yield problem
            return


def _state_problem(state: StateSpec, tensors: int) -> str | None:
    """Why the heads of layers with a state cannot be shared, in the configurations' words."""
    mamba = state.kind is Mixer.MAMBA2
    if state.heads % tensors:
        return f"{'mamba_num_heads' if mamba else 'linear_num_value_heads'} is {state.heads}"
    if state.groups % tensors and tensors % state.groups:
        name = "n_groups" if mamba else "linear_num_key_heads"
        return f"{name} is {state.groups}, neither a multiple nor a divisor of it"
    return None


def _quantized_problem(spec: ModelSpec, place: Place, parameter: Parameter) -> str | None:
    """Why a part of a quantized matrix cuts through what shares a scale or a word."""
    field, whole = field_of(parameter.name), Place(0, 1, 1)
    columns = column_window(spec, place, parameter)
    if columns != column_window(spec, whole, parameter):
        return _columns_problem(parameter, field, len(columns))
    pieces = row_pieces(spec, place, parameter)
    if pieces == row_pieces(spec, whole, parameter):
        return None
    names = ARCHITECTURES[spec.architecture].names_of(spec, field)
    # Where one tensor has several pieces, each begins within it; else each has scales and words of its own.
    joined, at = names.stored is Stored.ROWS and len(names.hf) < len(pieces), 0
    for rows, window in pieces:
        for size in (len(window), *([at] if joined else [])):
            if parameter.kind == "fp8_block" and size % BLOCK:
                return f"{field} would be cut at {size}, within its FP8 blocks of {BLOCK}"
            if parameter.scheme is not None and size % parameter.scheme.per_word:
                return f"{field} would be cut at {size}, within words of {parameter.scheme.per_word} codes"
        at += rows
    return None


def _columns_problem(parameter: Parameter, field: str, size: int) -> str | None:
    if parameter.kind == "fp8_block" and size % BLOCK:
        return f"{field} would be cut at {size}, within its FP8 blocks of {BLOCK}"
    if parameter.scheme is None:
        return None
    per_word = parameter.scheme.per_word
    if size % per_word:
        return f"{field} would be cut at {size}, within words of {per_word} codes"
    group = parameter.scheme.columns(parameter.shape[1])
    if group < parameter.shape[1] and size % group:
        return f"{field} would be cut at {size}, within its groups of {group}"
    if parameter.role is Role.EXPERTS and size % parameter.scheme.experts_block:
        return f"{field} would be cut at {size}, within its blocks of {parameter.scheme.experts_block}"
    return None
