"""Which checkpoint tensor goes where: every piece of every final tensor, checked against what the checkpoint holds.

Invariants: torch-free and pure. A route list covers each parameter of the spec completely and each checkpoint
tensor exactly once, tensors known to be harmless apart; otherwise a ModelError names the tensor.
Knows nothing of bytes and devices.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from stoker_runtime.checkpoint.tensor_entry import TensorEntry, find_entry, part_of
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import ROWS, Names
from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.grouped_rows import Groups, grouped_rows
from stoker_runtime.models.parameter import Parameter, Role
from stoker_runtime.models.spec import ModelSpec

MXFP4_BLOCK = 32  # numbers that share a scale
GGUF_LAYERS = "blk."
SCORE_HEAD = "score.weight"
"""The head of a decoder that classifies, in transformers' words."""
# Factors that the configuration was read from.
GGUF_IGNORED = r"rope_(freqs|factors_(long|short))\.weight"


class Vocabulary(StrEnum):
    """Whose tensor names a checkpoint uses."""

    HF = "hf"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class Route:
    """Checkpoint tensor `entry` becomes rows `[row, row + shape[0])` of final tensor `parameter`.

    `head_rows` > 0: within every group of that many rows, the halves of rotated pairs are interleaved in the checkpoint
    and must be pulled apart. `transposed`: the checkpoint holds columns for rows. `offset` is added to what
    it holds. `paired`: rows of gate and of up take turns. `scales` are those of numbers in MXFP4 or FP8. Of a tensor
    whose rows lie in groups `entry` is the rows from `source` on, of `source_rows`. `logarithm`: what is meant is the
    logarithm of what it holds, whose sign is turned. `normed`: of each row its direction is meant, of length 1.
    """

    entry: TensorEntry
    parameter: str
    row: int
    shape: tuple[int, ...]
    head_rows: int = 0
    transposed: bool = False
    offset: float = 0.0
    paired: bool = False
    scales: TensorEntry | None = None
    source: int = 0
    source_rows: int = 0
    logarithm: bool = False
    normed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are copied as they lie."""
        turned = self.head_rows or self.transposed or self.paired
        return not (turned or self.offset or self.scales or self.logarithm or self.normed)

    @property
    def together(self) -> int:
        """Rows that are read at once: all, where they change places or have scales apart."""
        return self.shape[0] if self.transposed or self.paired or self.scales else self.head_rows or 1


def route(
    spec: ModelSpec, entries: Mapping[str, TensorEntry], vocabulary: Vocabulary, packed: Container[str] = ()
) -> dict[str, tuple[Route, ...]]:
    """The routes into each parameter but those in `packed`, in the order of `spec.parameters()`, and of its rows.

    Raises ModelError for a tensor that is missing, of another shape than the spec's, or unknown.
    """
    plain = (parameter for parameter in spec.parameters() if parameter.name not in packed)
    routes = {parameter.name: _pieces(spec, parameter, entries, vocabulary) for parameter in plain}
    every = [piece for pieces in routes.values() for piece in pieces]
    used = {entry.name for piece in every for entry in (piece.entry, piece.scales) if entry is not None}
    for name in entries:
        if name not in used and not is_harmless(spec, name, vocabulary):
            raise ModelError(f"{entries[name].file}: tensor {name} has no place in a {spec.architecture}.")
    return routes


def _pieces(
    spec: ModelSpec, parameter: Parameter, entries: Mapping[str, TensorEntry], vocabulary: Vocabulary
) -> tuple[Route, ...]:
    stored = stored_form(spec, parameter.name, vocabulary)
    if stored is Stored.BY_HEAD:
        return tuple(_by_head(spec, parameter, entries, vocabulary))
    if vocabulary is Vocabulary.GGUF and (parts := state_parts(parameter.name, entries)):
        return _by_row(_read_by_state(spec, parameter, entries, parts))
    if stored is Stored.GROUPED:
        return _by_row(_grouped(spec, parameter, entries, vocabulary))
    if stored.is_stacked:
        return tuple(_stacked(spec, parameter, entries, stored))
    if vocabulary is Vocabulary.GGUF and (halves := widening_halves(parameter.name, entries)):
        return tuple(_widening(spec, parameter, halves))
    head_rows = _interleaved_rows(spec, parameter.name.rpartition(".")[2], vocabulary)
    # GGUF's converter has added it already.
    offset = spec.norm_offset if parameter.role is Role.NORM and vocabulary is Vocabulary.HF else 0.0
    transposed, paired = stored is Stored.COLUMNS, stored is Stored.PAIRED
    normed = spec.normed_head and parameter.name == "head"
    pieces: list[Route] = []
    row = 0
    names = tensor_names(spec, parameter.name, vocabulary)
    for position, (name, rows) in enumerate(zip(names, piece_rows(spec, parameter, len(names)), strict=True)):
        shape = (rows, *parameter.shape[1:])
        entry = find_entry(entries, name, shape[::-1] if transposed else shape, spec.architecture)
        # Values are never rotated: of Q, K and V the third keeps its rows.
        rotated = head_rows if position < 2 else 0
        decay = vocabulary is Vocabulary.GGUF and parameter.name.endswith(".a_log")
        pieces.append(
            Route(
                entry, parameter.name, row, shape, rotated, transposed, offset, paired, logarithm=decay, normed=normed
            )
        )  # fmt: skip
        row += rows
    return tuple(pieces)


def _by_row(pieces: Iterable[Route]) -> tuple[Route, ...]:
    """In the order of the rows that they become, as blocks of several formats lie."""
    return tuple(sorted(pieces, key=lambda piece: piece.row))


def _grouped(
    spec: ModelSpec, parameter: Parameter, entries: Mapping[str, TensorEntry], vocabulary: Vocabulary
) -> Iterator[Route]:
    """Tensors whose rows lie in groups, of which each has a part of several pieces, brought apart."""
    names = tensor_names(spec, parameter.name, vocabulary)
    tensors = grouped_rows(spec, parameter.name.rpartition(".")[2])
    yield from _in_groups(spec, parameter, entries, zip(names, tensors, strict=True))


def _in_groups(
    spec: ModelSpec, parameter: Parameter, entries: Mapping[str, TensorEntry], tensors: Iterable[tuple[str, Groups]]
) -> Iterator[Route]:
    for name, groups in tensors:
        entry = find_entry(entries, name, (groups.rows, *parameter.shape[1:]), spec.architecture)
        source = 0
        for group in range(groups.count):
            for start, rows in zip(groups.starts, groups.sizes, strict=True):
                shape = (rows, *parameter.shape[1:])
                yield Route(
                    rows_of(entry, source, shape), parameter.name, start + group * rows, shape,
                    source=source, source_rows=groups.rows,
                )  # fmt: skip
                source += rows


def state_parts(parameter: str, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Of a GGUF file that holds what the delta rule reads by parts, all queries before all keys, the names of these."""
    if not parameter.endswith(".state_in"):
        return ()
    prefix = f"{GGUF_LAYERS}{parameter.split('.')[1]}"
    names = (f"{prefix}.attn_qkv.weight", f"{prefix}.attn_gate.weight")
    return names if all(name in entries for name in names) else ()


def _read_by_state(
    spec: ModelSpec, parameter: Parameter, entries: Mapping[str, TensorEntry], parts: tuple[str, ...]
) -> Iterator[Route]:
    """What is convolved, then the gate; what is learned and forgotten by lies in groups as ever."""
    state = spec.recurrent
    assert state is not None, "what a state reads is of a layer with one"
    row = 0
    for name, rows in zip(parts, (state.channels, state.inner), strict=True):
        shape = (rows, *parameter.shape[1:])
        yield Route(find_entry(entries, name, shape, spec.architecture), parameter.name, row, shape)
        row += rows
    (last,) = tensor_names(spec, parameter.name, Vocabulary.GGUF)[1:]
    yield from _in_groups(spec, parameter, entries, [(last, grouped_rows(spec, "state_in")[1])])


def _by_head(
    spec: ModelSpec, parameter: Parameter, entries: Mapping[str, TensorEntry], vocabulary: Vocabulary
) -> Iterator[Route]:
    """A vector for each head, which is a row here."""
    (name,) = tensor_names(spec, parameter.name, vocabulary)
    heads, width = parameter.shape
    for head in range(heads):
        entry = find_entry(entries, name.format(head=head), (width,), spec.architecture)
        yield Route(entry, parameter.name, head, (1, width))


def _stacked(
    spec: ModelSpec, parameter: Parameter, entries: Mapping[str, TensorEntry], stored: Stored
) -> Iterator[Route]:
    """All experts in one tensor, expert by expert."""
    assert spec.moe is not None, "experts are of a mixture"
    (name,) = tensor_names(spec, parameter.name, Vocabulary.HF)
    experts = len(spec.moe.here)
    rows, columns = parameter.shape[0] // experts, parameter.shape[1:]
    stored = as_laid_out(spec, parameter.name, stored, entries, spec.moe.ffn)
    turned = stored is not Stored.STACKED
    packed = turned and bool(spec.moe.packing) and bool(columns)
    scales = None
    if packed:
        # In four bits rows are rows.
        blocks = (experts, rows, columns[0] // MXFP4_BLOCK)
        entry = find_entry(entries, f"{name}_blocks", (*blocks, MXFP4_BLOCK // 2), spec.architecture)
        scales = find_entry(entries, f"{name}_scales", blocks, spec.architecture)
    else:
        shape = (experts, *columns, rows) if turned else (experts, rows, *columns)
        entry = find_entry(entries, name, shape, spec.architecture)
    paired = stored is Stored.STACKED_COLUMNS and "gate_up" in parameter.name
    for expert in range(experts):
        yield Route(
            rows_of(entry, expert, (1, *entry.shape[1:])), parameter.name, expert * rows, (rows, *columns),
            transposed=turned and bool(columns) and not packed, paired=paired,
            scales=scales and rows_of(scales, expert, (1, *scales.shape[1:])),
        )  # fmt: skip


def as_laid_out(
    spec: ModelSpec, parameter: str, stored: Stored, entries: Mapping[str, TensorEntry], ffn: int
) -> Stored:
    """How a layer's stacked experts of `ffn` units are stored: turned ones are turned back by some who save a model.

    Of its two tensors one at most is a square, which does not say.
    """
    if stored is not Stored.STACKED_HALVES:
        return stored
    for field, shape in (("experts_gate_up", (2 * ffn, spec.hidden)), ("experts_down", (spec.hidden, ffn))):
        (name,) = tensor_names(spec, f"{parameter.rpartition('.')[0]}.{field}", Vocabulary.HF)
        if name in entries and shape[0] != shape[1]:
            return Stored.STACKED if entries[name].shape[1:] == shape else stored
    return stored


def widening_halves(parameter: str, entries: Mapping[str, TensorEntry]) -> tuple[TensorEntry, ...]:
    """Of a GGUF file that holds what widens latents in two tensors, those: of keys `[heads, rank, key]`, turned, and of
    values `[heads, value, rank]`. Else none.
    """
    if not parameter.endswith(".kv_b"):
        return ()
    names = (f"{GGUF_LAYERS}{parameter.split('.')[1]}.attn_{half}_b.weight" for half in "kv")
    return tuple(entries[name] for name in names if name in entries)


def _widening(spec: ModelSpec, parameter: Parameter, halves: tuple[TensorEntry, ...]) -> Iterator[Route]:
    latent = spec.latent
    assert latent is not None, "what is widened is latent"
    rank, keys, values = latent.kv_lora_rank, latent.qk_nope_head_dim, latent.v_head_dim
    shapes = ((spec.heads, rank, keys), (spec.heads, values, rank))
    for half, shape in zip(halves, shapes, strict=True):
        find_entry({half.name: half}, half.name, shape, spec.architecture)
    for head in range(spec.heads):
        start = head * (keys + values)
        of_keys, of_values = (rows_of(half, head, (1, *half.shape[1:])) for half in halves)
        yield Route(of_keys, parameter.name, start, (keys, rank), transposed=True)
        yield Route(of_values, parameter.name, start + keys, (values, rank))


def rows_of(entry: TensorEntry, first: int, shape: tuple[int, ...]) -> TensorEntry:
    """Rows from `first` on of a tensor, as many as `shape` has."""
    row_bytes = entry.num_bytes // entry.shape[0]
    return part_of(entry, first * row_bytes, shape[0] * row_bytes, shape)


def stored_form(spec: ModelSpec, parameter: str, vocabulary: Vocabulary) -> Stored:
    """GGUF's converter has brought all pieces to rows, and `entries_apart` experts apart."""
    names = _names(spec, parameter)
    if vocabulary is Vocabulary.GGUF:
        return Stored.BY_EXPERT if _is_by_expert(names.gguf) else names.gguf_stored
    return names.stored


def _is_by_expert(names: tuple[str, ...]) -> bool:
    return any("{expert}" in name for name in names)


def _names(spec: ModelSpec, parameter: str) -> Names:
    row = ROWS[spec.architecture]
    if parameter == "head" and spec.tie_embeddings:
        # Which stands apart where it is quantized.
        parameter = "embed"
    if not parameter.startswith("layers."):
        return row.top_names[parameter]
    return row.names_of(spec, parameter.rpartition(".")[2])


def tensor_names(spec: ModelSpec, parameter: str, vocabulary: Vocabulary) -> tuple[str, ...]:
    """The checkpoint's names of a final tensor's pieces, in row order."""
    names = _names(spec, parameter)
    spoken = _spoken(names, vocabulary)
    if not parameter.startswith("layers."):
        return spoken
    prefix = ROWS[spec.architecture].layers if vocabulary is Vocabulary.HF else GGUF_LAYERS
    layer = parameter.split(".")[1]
    if _is_by_expert(spoken) and spec.moe is not None:
        spoken = tuple(name.format(expert=expert) for expert in spec.moe.here for name in spoken)
    return tuple(f"{prefix}{layer}.{name}" for name in spoken)


def _spoken(names: Names, vocabulary: Vocabulary) -> tuple[str, ...]:
    return names.hf if vocabulary is Vocabulary.HF else names.gguf


def tensors_of(spec: ModelSpec, parameter: str) -> int:
    """How many tensors of a Hugging Face checkpoint a final one is, which stand in it one behind the other; 1 where
    their rows are brought apart.
    """
    names = _names(spec, parameter)
    return 1 if names.stored is Stored.GROUPED else len(names.hf)


def piece_rows(spec: ModelSpec, parameter: Parameter, pieces: int) -> tuple[int, ...]:
    """The rows of each of a final tensor's `pieces` in a checkpoint, as they are stacked here."""
    if pieces == 1:
        return (parameter.shape[0],)
    if spec.latent is not None and parameter.name.endswith(".qkv"):
        return (spec.latent.queries(spec.heads), spec.latent.cached)
    if (state := spec.recurrent) is not None and parameter.name.endswith(".state_in"):
        # What is convolved, the gate, and what is learned and forgotten by.
        sizes = (state.channels, state.inner, state.heads, state.heads)
        return sizes[:2] if state.gates_apart else sizes
    if pieces == 3 and "experts_" not in parameter.name:
        return (spec.q_size, spec.kv_size, spec.kv_size)
    return (parameter.shape[0] // pieces,) * pieces


def _interleaved_rows(spec: ModelSpec, field: str, vocabulary: Vocabulary) -> int:
    interleaved = ROWS[spec.architecture].gguf_interleaved and vocabulary is Vocabulary.GGUF
    return spec.head_dim if interleaved and field in ("qkv", "qkv_bias") else 0


def is_harmless(spec: ModelSpec, name: str, vocabulary: Vocabulary) -> bool:
    """Whether a tensor of a checkpoint says nothing that the decoder needs."""
    # A tied checkpoint may still carry its copy of the embedding as output head, and pooling needs no head.
    top = ROWS[spec.architecture].top_names
    heads = [top[each] for each in ("head", "head_bias") if each in top]
    if spec.tie_embeddings and any(name in _spoken(each, vocabulary) for each in heads):
        return True
    if spec.scores and name == SCORE_HEAD:
        return True
    layers = ROWS[spec.architecture].layers if vocabulary is Vocabulary.HF else GGUF_LAYERS
    draft = re.match(re.escape(layers) + r"(\d+)\.", name)
    if draft is not None and spec.num_layers <= int(draft[1]) < spec.num_layers + spec.draft_layers:
        return True
    ignored = ROWS[spec.architecture].ignored if vocabulary is Vocabulary.HF else GGUF_IGNORED
    return re.fullmatch(ignored, name) is not None
