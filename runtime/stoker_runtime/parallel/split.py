"""How a model is cut into ranks: the spec of each rank's part, and which rows and columns of a tensor are its own.

Matrices that make heads or feed-forward units are cut by rows, those that read them by columns, so that each layer
sums over the ranks twice; embedding and head by rows of the vocabulary. Key-value heads that are fewer than the ranks
are held by several, and latents, which all heads read, by all.

Invariants: torch-free. Every parameter of a spec has an entry in `SPLITS`; a model, or a setting, that is not known
to be cut rightly is an error that names it and the sizes that work.
Knows nothing of files and of what is exchanged, nor of how experts are stored (`mixture.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from enum import StrEnum

from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.models.architectures import ARCHITECTURES
from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.layer_specs.latent_spec import LatentSpec
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.parameter import BLOCK, ITEM_BYTES, QUANTIZED, Parameter, Role
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.quantization.integer_checkpoint import IntegerCheckpoint
from stoker_runtime.models.spec import ModelSpec, Part, QkNorm
from stoker_runtime.parallel import mixture
from stoker_runtime.parallel.mixture import check_whole_experts, part_of
from stoker_runtime.parallel.place import Place

MOST_TENSORS = 64


class Split(StrEnum):
    """How a parameter is cut: not at all; by rows of heads, or a row for each; by rows of feed-forward units; by
    columns that follow either; not, but it is the first rank's alone; by rows of the vocabulary. Those of experts, and
    of what they share, are of widths of their own; with whole experts a rank they are cut by expert.
    """

    WHOLE = "whole"
    HEADS = "heads"
    UNITS = "units"
    HEAD_COLUMNS = "head columns"
    UNIT_COLUMNS = "unit columns"
    ONCE = "once"
    VOCABULARY = "vocabulary"
    HEAD_ROWS = "head rows"
    EXPERT_UNITS = "units of each expert"
    EXPERT_COLUMNS = "columns of each expert"
    EXPERT_ONCE = "once for each expert"
    SHARED_UNITS = "units of the shared expert"
    SHARED_COLUMNS = "columns of the shared expert"


SPLITS = {
    "embed": Split.VOCABULARY,
    "head": Split.VOCABULARY,
    "head_bias": Split.VOCABULARY,
    "positions": Split.WHOLE,
    "embed_norm": Split.WHOLE,
    "embed_norm_bias": Split.WHOLE,
    "final_norm": Split.WHOLE,
    "final_norm_bias": Split.WHOLE,
    "input_norm": Split.WHOLE,
    "input_norm_bias": Split.WHOLE,
    "attention_post_norm": Split.WHOLE,
    "ffn_norm": Split.WHOLE,
    "ffn_norm_bias": Split.WHOLE,
    "ffn_post_norm": Split.WHOLE,
    "q_norm": Split.WHOLE,
    "k_norm": Split.WHOLE,
    "qkv": Split.HEADS,
    "qkv_bias": Split.HEADS,
    "q_a_norm": Split.WHOLE,
    "q_b": Split.HEADS,
    "kv_a_norm": Split.WHOLE,
    "kv_b": Split.HEADS,
    "output": Split.HEAD_COLUMNS,
    "output_bias": Split.ONCE,
    "gate_up": Split.UNITS,
    "gate_up_bias": Split.UNITS,
    "down": Split.UNIT_COLUMNS,
    "down_bias": Split.ONCE,
    "sinks": Split.HEAD_ROWS,
    "router": Split.WHOLE,
    "router_bias": Split.WHOLE,
    "correction_bias": Split.WHOLE,
    "experts_gate_up": Split.EXPERT_UNITS,
    "experts_gate_up_bias": Split.EXPERT_UNITS,
    "experts_down": Split.EXPERT_COLUMNS,
    "experts_down_bias": Split.EXPERT_ONCE,
    "shared_gate": Split.WHOLE,
    "shared_gate_up": Split.SHARED_UNITS,
    "shared_down": Split.SHARED_COLUMNS,
}
OF_EXPERTS = (Split.EXPERT_UNITS, Split.EXPERT_COLUMNS, Split.EXPERT_ONCE)
CUT_COLUMNS = (Split.HEAD_COLUMNS, Split.UNIT_COLUMNS, Split.EXPERT_COLUMNS, Split.SHARED_COLUMNS)
# Fields of a spec that a rank's part changes, and those that mean the same of it.
CUT_FIELDS = {
    "num_layers", "heads", "kv_heads", "ffn", "windows", "unrotated", "sparse", "dense_parameters", "part", "moe",
}  # fmt: skip
SAME_FIELDS = {
    "architecture", "hidden", "head_dim", "vocab", "eps", "rope", "activation", "max_position", "tie_embeddings",
    "qkv_bias", "output_bias", "ffn_bias", "head_bias", "gated", "norm", "norm_bias", "norm_offset", "pre_norms",
    "post_norms", "parallel", "shared_norm", "qk_norm", "local_rope", "learned_positions", "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "attention_softcap", "logit_scale", "logit_softcap", "dtype",
    "eos_token_ids", "checkpoint", "sinks", "draft_layers", "latent", "head_kind", "slopes",
    "embedding_norm", "normed_head", "activation_limit", "unused_tokens",
}  # fmt: skip


def field_of(parameter: str) -> str:
    """`qkv` of `layers.3.qkv`."""
    return parameter.rpartition(".")[2]


def split_spec(spec: ModelSpec, place: Place) -> ModelSpec:
    """The spec of the part of `spec` that the rank at `place` has. Raises ConfigError where it cannot be cut so."""
    check_split(spec, place)
    if place.world == 1:
        return spec
    layers = place.layers(spec.num_layers)
    dense = (whole_name(name, -layers.start) for name in spec.dense_parameters if layer_of(name) in layers)
    part = Part(
        tensor=place.tensor,
        tensors=place.tensors,
        begins=place.is_first,
        ends=place.is_last,
        step_parameters=spec.active_bytes("bfloat16") // ITEM_BYTES["bfloat16"] // place.world,
    )
    own = spec.of_layers(layers)
    return replace(
        own,
        heads=spec.heads // place.tensors,
        kv_heads=len(kv_heads(spec, place)),
        ffn=spec.ffn // place.tensors,
        dense_parameters=frozenset(dense),
        part=part,
        moe=own.moe and part_of(own.moe, place),
    )


def kv_heads(spec: ModelSpec, place: Place) -> range:
    """The key-value heads of a rank; where there are fewer than ranks, one that neighbours have too."""
    if spec.kv_heads % place.tensors == 0:
        each = spec.kv_heads // place.tensors
        return range(place.tensor * each, (place.tensor + 1) * each)
    first = place.tensor * spec.kv_heads // place.tensors
    return range(first, first + 1)


def layer_of(parameter: str) -> int:
    """The layer of `layers.3.qkv`; -1 for a tensor of no layer."""
    return int(parameter.split(".")[1]) if parameter.startswith("layers.") else -1


def whole_name(parameter: str, first_layer: int) -> str:
    """The name in the whole model of a rank's parameter, whose layers are counted from `first_layer`."""
    if not parameter.startswith("layers."):
        return parameter
    return f"layers.{layer_of(parameter) + first_layer}.{field_of(parameter)}"


def piece_window(spec: ModelSpec, place: Place, parameter: Parameter, piece: int) -> tuple[range, range]:
    """The rows and columns of piece `piece` of a whole parameter (Q, K or V; gate or up) that the rank has.

    A vector has one column. Of the whole spec and its parameter; of experts' those of each expert that is there.
    """
    split = SPLITS[field_of(parameter.name)]
    rows, columns = range(parameter.shape[0]), range(parameter.shape[1] if len(parameter.shape) > 1 else 1)
    if split is Split.VOCABULARY:
        return place.rows(spec.vocab), columns
    heads, units = place.units(spec.heads), place.units(spec.ffn)
    if split is Split.HEADS and spec.latent is not None:
        return _latent_rows(spec.latent, heads, field_of(parameter.name), piece), columns
    if split is Split.HEADS:
        return times(heads if piece == 0 else kv_heads(spec, place), spec.head_dim), columns
    if split is Split.UNITS:
        return units, columns
    if split is Split.HEAD_COLUMNS:
        return rows, times(heads, spec.attended_size // spec.heads)
    if split is Split.UNIT_COLUMNS:
        return rows, units
    if split is Split.HEAD_ROWS:
        return heads, columns
    return _mixture_window(spec, place, split, rows, columns)


def _latent_rows(latent: LatentSpec, heads: range, field: str, piece: int) -> range:
    """The rows of a rank: those of its heads; what all heads read, latents and narrow queries, every rank makes."""
    if field == "kv_b":
        return times(heads, latent.qk_nope_head_dim + latent.v_head_dim)
    if field == "qkv" and (piece == 1 or latent.q_lora_rank):
        return range(latent.cached if piece == 1 else latent.q_lora_rank)
    return times(heads, latent.qk_head_dim)


def _mixture_window(spec: ModelSpec, place: Place, split: Split, rows: range, columns: range) -> tuple[range, range]:
    if spec.moe is None or split not in (*OF_EXPERTS, Split.SHARED_UNITS, Split.SHARED_COLUMNS):
        return rows, columns
    shared, units = place.units(spec.moe.shared_ffn), place.units(spec.moe.ffn)
    if split in OF_EXPERTS and place.whole_experts:
        units = range(spec.moe.ffn)
    windows = {
        Split.SHARED_UNITS: (shared, columns),
        Split.SHARED_COLUMNS: (rows, shared),
        Split.EXPERT_UNITS: (units, columns),
        Split.EXPERT_COLUMNS: (range(spec.hidden), units),
        Split.EXPERT_ONCE: (range(spec.hidden), columns),
    }
    return windows[split]


def times(heads: range, size: int) -> range:
    """The rows of these heads."""
    return range(heads.start * size, heads.stop * size)


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
    if isinstance(spec.checkpoint, IntegerCheckpoint) and spec.checkpoint.scheme.order:
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
    unknown |= set(uncut(spec)) if tensors > 1 else set()
    if unknown:
        setting = "tensor_parallel_size" if tensors > 1 else "pipeline_parallel_size"
        raise ModelError(
            f"{spec.architecture} cannot be cut so yet, because of its {', '.join(sorted(unknown))}; run it with "
            f"--{setting.replace('_', '-')} 1.",
            param=setting,
        )


def pieces_of(spec: ModelSpec, parameter: str) -> int:
    """Of how many matrices, one upon the other, a parameter is made: Q, K and V; queries and latents; gate and up."""
    split = SPLITS.get(field_of(parameter))
    if split is Split.HEADS and spec.latent is not None:
        return 2 if field_of(parameter) == "qkv" else 1
    if split in (Split.EXPERT_UNITS, Split.SHARED_UNITS):
        return 2
    return 3 if split is Split.HEADS else 2 if split is Split.UNITS and spec.gated else 1


def uncut(spec: ModelSpec) -> Iterator[str]:
    """What of a model cannot be cut within a layer yet, in words."""
    if spec.qk_norm not in (QkNorm.NONE, QkNorm.HEAD):
        yield "norms over several heads"
    if spec.learned_positions:
        yield "learned positions"
    if spec.slopes:
        yield "heads with slopes of their own (ALiBi)"
    if spec.sparse is not None:
        yield "heads that see blocks of their own"
    if spec.embedding_norm or spec.normed_head:
        yield "norms of the embedding or of the head"
    if spec.unused_tokens:
        yield "tokens that are never written"
    row = ARCHITECTURES[spec.architecture]
    for parameter in unlike_parameters(spec):
        names = row.names_of(spec, field_of(parameter.name))
        if names.stored.is_stacked:
            continue
        if names.stored not in (Stored.ROWS, Stored.BY_EXPERT) or len(names.hf) != pieces_of(spec, parameter.name):
            yield f"{names.hf[0]}, which is stored in one piece"


def unlike_parameters(spec: ModelSpec) -> list[Parameter]:
    """Of all layers' parameters one of each field and kind."""
    layers = (spec.layer_parameters(layer) for layer in range(spec.num_layers))
    return list({(field_of(each.name), each.kind): each for layer in layers for each in layer}.values())


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
    if spec.moe is not None:
        yield from mixture.mixture_problems(spec.moe, tensors, whole_experts=place.whole_experts)
    part = replace(place, rank=0, stages=1)
    for parameter in unlike_parameters(spec):
        if SPLITS[field_of(parameter.name)] in OF_EXPERTS and place.whole_experts:
            continue
        if parameter.role is Role.LATENT and isinstance(spec.checkpoint, Fp8Checkpoint):
            parameter = replace(parameter, kind=spec.checkpoint.kind)  # until it is loaded
        if parameter.role in (*QUANTIZED, Role.LATENT) and parameter.kind not in ("", "dense"):
            for piece in range(pieces_of(spec, parameter.name)):
                rows, columns = piece_window(spec, part, parameter, piece)
                if (rows, columns) == piece_window(spec, Place(0, 1, 1), parameter, piece):
                    continue
                if (problem := _quantized_problem(parameter, len(rows), len(columns))) is not None:
                    yield problem
                    return


def _quantized_problem(parameter: Parameter, rows: int, columns: int) -> str | None:
    """Why a part of `rows` × `columns` of a quantized matrix cuts through what shares a scale or a word."""
    field = field_of(parameter.name)
    cut_columns = SPLITS[field] in CUT_COLUMNS
    size = columns if cut_columns else rows
    if parameter.kind == "fp8_block" and size % BLOCK:
        return f"{field} would be cut at {size}, within its FP8 blocks of {BLOCK}"
    if parameter.scheme is None:
        return None
    per_word = parameter.scheme.per_word
    if size % per_word:
        return f"{field} would be cut at {size}, within words of {per_word} codes"
    group = parameter.scheme.columns(parameter.shape[1])
    if cut_columns and group < parameter.shape[1] and size % group:
        return f"{field} would be cut at {size}, within its groups of {group}"
    if cut_columns and parameter.role is Role.EXPERTS and size % parameter.scheme.experts_block:
        return f"{field} would be cut at {size}, within its blocks of {parameter.scheme.experts_block}"
    return None
