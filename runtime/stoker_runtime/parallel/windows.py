"""Which rows and columns of a parameter are a rank's: how each field is cut, and of which pieces it is made.

Heads, and what follows them, are cut evenly. Key-value heads, and groups of heads with a state, that are fewer than the
ranks are held by several. Of a parameter that stacks several matrices each piece is cut by itself.

Invariants: torch-free. Pieces are those of the whole model's parameter, in their order; of experts, those of each one.
Knows nothing of files, and of what a rank's spec is.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from stoker_runtime.models.layer_specs.latent_spec import LatentSpec
from stoker_runtime.models.layer_specs.state_spec import Mixer, StateSpec
from stoker_runtime.models.parameter import Parameter
from stoker_runtime.models.spec import ModelSpec, QkNorm
from stoker_runtime.parallel.place import Place

Piece = tuple[int, range]
"""The rows of a matrix that others stand upon, and which of them are a rank's."""


class Split(StrEnum):
    """How a parameter is cut: not at all; by rows of heads, or a row for each; by rows of feed-forward units; by
    columns that follow either; not, but it is the first rank's alone; by rows of the vocabulary. Those of experts, and
    of what they share, are of widths of their own; with whole experts a rank they are cut by expert. What makes, or
    reads, a state is cut by that layer's heads, and their groups.
    """

    WHOLE = "whole"
    HEADS = "heads"
    UNITS = "units"
    HEAD_COLUMNS = "head columns"
    UNIT_COLUMNS = "unit columns"
    ONCE = "once"
    VOCABULARY = "vocabulary"
    HEAD_ROWS = "head rows"
    HEAD_NORMS = "norms of heads"
    EXPERT_UNITS = "units of each expert"
    EXPERT_COLUMNS = "columns of each expert"
    EXPERT_ONCE = "once for each expert"
    SHARED_UNITS = "units of the shared expert"
    SHARED_COLUMNS = "columns of the shared expert"
    STATE_ROWS = "rows of heads with a state"
    STATE_COLUMNS = "columns of heads with a state"


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
    "q_norm": Split.HEAD_NORMS,
    "k_norm": Split.HEAD_NORMS,
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
    "state_in": Split.STATE_ROWS,
    "state_in_bias": Split.STATE_ROWS,
    "state_gates": Split.STATE_ROWS,
    "conv": Split.STATE_ROWS,
    "conv_bias": Split.STATE_ROWS,
    "a_log": Split.STATE_ROWS,
    "skip": Split.STATE_ROWS,
    "dt_bias": Split.STATE_ROWS,
    "state_norm": Split.STATE_ROWS,
    "state_out": Split.STATE_COLUMNS,
    "state_out_bias": Split.ONCE,
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
CUT_COLUMNS = (
    Split.HEAD_COLUMNS, Split.UNIT_COLUMNS, Split.EXPERT_COLUMNS, Split.SHARED_COLUMNS, Split.STATE_COLUMNS,
)  # fmt: skip


def field_of(parameter: str) -> str:
    """`qkv` of `layers.3.qkv`."""
    return parameter.rpartition(".")[2]


def held_once(count: int, place: Place) -> range:
    """Which of `count` things that heads share a rank has; where there are fewer than ranks, one that neighbours have
    too.
    """
    if count % place.tensors == 0:
        return place.units(count)
    first = place.tensor * count // place.tensors
    return range(first, first + 1)


def kv_heads(spec: ModelSpec, place: Place) -> range:
    """The key-value heads of a rank."""
    return held_once(spec.kv_heads, place)


def times(heads: range, size: int) -> range:
    """The rows of these heads."""
    return range(heads.start * size, heads.stop * size)


def pieces_of(spec: ModelSpec, parameter: Parameter) -> int:
    """Of how many matrices, one upon the other, a parameter is made: Q, K and V; queries and latents; gate and up."""
    return len(row_pieces(spec, Place(0, 1, 1), parameter))


def piece_window(spec: ModelSpec, place: Place, parameter: Parameter, piece: int) -> tuple[range, range]:
    """The rows and columns of piece `piece` of a whole parameter that the rank has. A vector has one column."""
    pieces = row_pieces(spec, place, parameter)
    return pieces[piece % len(pieces)][1], column_window(spec, place, parameter)


def row_pieces(spec: ModelSpec, place: Place, parameter: Parameter) -> tuple[Piece, ...]:
    """The pieces of a whole parameter; of experts', those of each expert."""
    field = field_of(parameter.name)
    split, rows = SPLITS[field], parameter.shape[0]
    heads = place.units(spec.heads)
    if split is Split.VOCABULARY:
        return ((rows, place.rows(spec.vocab)),)
    if split is Split.HEADS and spec.latent is not None:
        return tuple(_latent_pieces(spec, spec.latent, heads, field))
    if split is Split.HEADS:
        queries = (spec.q_size, times(heads, spec.head_dim))
        keys = (spec.kv_size, times(kv_heads(spec, place), spec.head_dim))
        return (queries, keys, keys, *([queries] if spec.attention_gate else []))
    if split is Split.UNITS:
        return ((spec.ffn, place.units(spec.ffn)),) * (2 if spec.gated else 1)
    if split is Split.HEAD_ROWS:
        return ((rows, heads),)
    if split is Split.HEAD_NORMS and spec.qk_norm is QkNorm.LAYER:
        return ((rows, heads if field == "q_norm" else kv_heads(spec, place)),)
    if split is Split.HEAD_NORMS and spec.qk_norm is QkNorm.WHOLE:
        return ((rows, times(heads if field == "q_norm" else kv_heads(spec, place), spec.head_dim)),)
    if split is Split.STATE_ROWS and spec.recurrent is not None and (found := state_pieces(spec.recurrent, field)):
        return tuple(_state_rows(spec.recurrent, place, found))
    return _mixture_pieces(spec, place, split) or ((rows, range(rows)),)


def column_window(spec: ModelSpec, place: Place, parameter: Parameter) -> range:
    """The columns of a whole parameter that the rank has."""
    split = SPLITS[field_of(parameter.name)]
    heads, units = place.units(spec.heads), place.units(spec.ffn)
    if split is Split.HEAD_COLUMNS:
        return times(heads, spec.attended_size // spec.heads)
    if split is Split.UNIT_COLUMNS:
        return units
    if split is Split.STATE_COLUMNS and spec.recurrent is not None:
        return times(place.units(spec.recurrent.heads), spec.recurrent.head_dim)
    if split is Split.SHARED_COLUMNS and spec.moe is not None:
        return place.units(spec.moe.shared_ffn)
    if split is Split.EXPERT_COLUMNS and spec.moe is not None and not place.whole_experts:
        return place.units(spec.moe.ffn)
    return range(parameter.shape[1] if len(parameter.shape) > 1 else 1)


def _latent_pieces(spec: ModelSpec, latent: LatentSpec, heads: range, field: str) -> Iterator[Piece]:
    """Those of heads; what all heads read, latents and narrow queries, every rank makes."""
    if field == "kv_b":
        each = latent.qk_nope_head_dim + latent.v_head_dim
        yield spec.heads * each, times(heads, each)
        return
    if field == "qkv" and latent.q_lora_rank:
        yield latent.q_lora_rank, range(latent.q_lora_rank)
    else:
        yield spec.heads * latent.qk_head_dim, times(heads, latent.qk_head_dim)
    if field == "qkv":
        yield latent.cached, range(latent.cached)


def state_pieces(state: StateSpec, field: str) -> tuple[tuple[bool, int], ...]:
    """The pieces of what belongs to a layer with a state: whether there is one for each head, else for each group, and
    how many rows each has. None for what all heads share.
    """
    mamba = state.kind is Mixer.MAMBA2
    values, keys, numbers = (True, state.head_dim), (False, state.size), (True, 1)
    convolved = (values, keys, keys) if mamba else (keys, keys, values)
    if field in ("conv", "conv_bias"):
        return convolved
    if field == "state_gates":
        return numbers, numbers
    if field in ("state_in", "state_in_bias"):
        gates = (numbers, numbers) if not (mamba or state.gates_apart) else ()
        return (values, *convolved, numbers) if mamba else (*convolved, values, *gates)
    if field == "state_norm":
        return (values,) if mamba else ()
    return (numbers,)


def _state_rows(state: StateSpec, place: Place, pieces: tuple[tuple[bool, int], ...]) -> Iterator[Piece]:
    heads, groups = place.units(state.heads), held_once(state.groups, place)
    for of_heads, size in pieces:
        yield (state.heads if of_heads else state.groups) * size, times(heads if of_heads else groups, size)


def _mixture_pieces(spec: ModelSpec, place: Place, split: Split) -> tuple[Piece, ...]:
    """Pieces of a mixture's parameters, if it is one of those that are cut; else none."""
    if spec.moe is None:
        return ()
    parts, moe = 2 if spec.gated else 1, spec.moe
    if split is Split.SHARED_UNITS:
        return ((moe.shared_ffn, place.units(moe.shared_ffn)),) * parts
    if split is Split.EXPERT_UNITS:
        return ((moe.ffn, range(moe.ffn) if place.whole_experts else place.units(moe.ffn)),) * parts
    return ((spec.hidden, range(spec.hidden)),) if split in OF_EXPERTS else ()
