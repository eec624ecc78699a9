"""Loads the weights of a checkpoint that lie in several tensors each, integers and floats of four bits: found, checked,
read, and laid out as the kernels of the device read them.

Invariants: every such weight has exactly the tensors of its packing, of the shapes that fit, before a byte is moved;
otherwise a ModelError names the tensor. Reading the next matrix goes on while one is laid out; dequantized are those
alone that no product reads packed, or that become something else (`requantize.py`).
Knows nothing of how products are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_runtime.checkpoint.tensor_entry import TensorEntry, find_entry
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.grouped_rows import Groups, grouped_rows, row_order
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.quantization.fp4_checkpoint import Fp4Checkpoint
from stoker_runtime.models.quantization.integer_checkpoint import IntegerCheckpoint
from stoker_runtime.models.quantization.quantized_checkpoint import PackedCheckpoint
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES, READABLE_DTYPES, CopyLanes
from stoker_runtime.weights.expert_places import Fp4Experts, IntegerExperts
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.packed import fp4_files, integer_files
from stoker_runtime.weights.packed.mxfp4 import read_bytes
from stoker_runtime.weights.routing import Vocabulary, piece_rows, stored_form, tensor_names

Entries = Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class PackedRoute:
    """The tensors of `module`, by suffix, become rows `[row, row + rows)` of a final tensor; `checkpoint` says how
    they hold its weight.

    `said` are those that must only agree with what the configuration says.
    """

    checkpoint: PackedCheckpoint
    module: str
    row: int
    rows: int
    entries: Entries
    said: Entries


def packed_pieces(spec: ModelSpec, name: str) -> tuple[PackedCheckpoint, ...]:
    """How the pieces of a matrix are packed, in one scheme or each in its own; nothing where they are not."""
    return tuple(each for each in spec.pieces_of(name) if isinstance(each, PackedCheckpoint))


def plan_packed(spec: ModelSpec, entries: Entries) -> dict[str, tuple[PackedRoute, ...]]:
    """The routes into each packed parameter. Raises ModelError naming a tensor that is missing, misshaped or
    mistyped.
    """
    plan = {}
    for parameter in spec.parameters():
        schemes = packed_pieces(spec, parameter.name)
        if not schemes:
            continue
        names = tensor_names(spec, parameter.name, Vocabulary.HF)
        may_widen = parameter.role in (Role.LATENT, Role.EXPERTS)
        if parameter.scheme is not None or (may_widen and not _is_plain(entries.get(names[0]))):
            pieces, row = [], 0
            grouped = _groups(spec, parameter.name)
            counts = [each.rows for each in grouped] if grouped else piece_rows(spec, parameter, len(names))
            each = schemes if len(schemes) > 1 else schemes * len(names)
            for name, rows, checkpoint in zip(names, counts, each, strict=True):
                module = name.removesuffix(".weight")
                pieces.append(_route(spec, checkpoint, entries, module, row, (rows, parameter.shape[1])))
                row += rows
            _check_values(pieces, one_order=parameter.role is not Role.EXPERTS)
            plan[parameter.name] = tuple(pieces)
    return plan


def _is_plain(entry: TensorEntry | None) -> bool:
    return entry is not None and entry.encoding in PLAIN_DTYPES


def _groups(spec: ModelSpec, name: str) -> tuple[Groups, ...]:
    """How the rows of a final tensor lie in the checkpoint's, if they do so in groups; else nothing."""
    grouped = stored_form(spec, name, Vocabulary.HF) is Stored.GROUPED
    return grouped_rows(spec, name.rpartition(".")[2]) if grouped else ()


def taken_names(spec: ModelSpec, plan: Mapping[str, tuple[PackedRoute, ...]], entries: Entries) -> set[str]:
    """The checkpoint's tensors that the plan takes, and those that say nothing new.

    That is what the configuration says already, and biases of nothing but zeros, which GPTQ writes for linears that
    have none. Raises OSError for a file that cannot be read.
    """
    routes = [route for routes in plan.values() for route in routes]
    names = {entry.name for route in routes for entry in route.entries.values()}
    names |= {f"{route.module}.{suffix}" for route in routes for suffix in _said_already(route.checkpoint)}
    wanted = {name for each in spec.parameters() for name in tensor_names(spec, each.name, Vocabulary.HF)}
    biases = (entries.get(f"{route.module}.bias") for route in routes)
    return names | {bias.name for bias in biases if bias and bias.name not in wanted and _is_zero(bias)}


def _said_already(checkpoint: PackedCheckpoint) -> tuple[str, ...]:
    """Suffixes of tensors that a weight may have besides, and that nothing here needs."""
    if isinstance(checkpoint, IntegerCheckpoint):
        return integer_files.optional_suffixes(checkpoint.packing)
    return fp4_files.UNUSED


def _is_zero(entry: TensorEntry) -> bool:
    return not bool(read_bytes(entry).any())


def _route(
    spec: ModelSpec, checkpoint: PackedCheckpoint, entries: Entries, module: str, row: int, shape: tuple[int, int]
) -> PackedRoute:
    try:
        if isinstance(checkpoint, Fp4Checkpoint):
            sizes = fp4_files.tensor_shapes(checkpoint, *shape)
        else:
            sizes = integer_files.tensor_shapes(checkpoint, *shape)
    except ModelError as error:
        raise ModelError(f"{module}: {error}.", param="quantization_config") from error
    plain = entries.get(f"{module}.weight")
    if plain is not None and _is_plain(plain):
        raise ModelError(
            f"{plain.file}: tensor {plain.name} is not quantized, but quantization_config says "
            f"{checkpoint.method}; modules that are not quantized must be named there."
        )
    try:
        found = {suffix: _find(spec, entries, f"{module}.{suffix}", size) for suffix, size in sizes.items()}
        said = _said(spec, checkpoint, entries, module, shape[1])
    except ModelError as error:
        parts = ", ".join(f"{suffix} {list(size)}" for suffix, size in sizes.items())
        raise ModelError(f"{error} {checkpoint.described} by {checkpoint.method} have {parts}.") from error
    for suffix, entry in (found | said).items():
        known = encodings(checkpoint, suffix)
        if entry.encoding not in known:
            raise ModelError(f"{entry.file}: tensor {entry.name} is {entry.encoding}; it must be {', '.join(known)}.")
    return PackedRoute(checkpoint, module, row, shape[0], found, said)


def _said(
    spec: ModelSpec, checkpoint: PackedCheckpoint, entries: Entries, module: str, columns: int
) -> dict[str, TensorEntry]:
    """An order of columns where the configuration says that there is none; a rank's part was checked with the whole."""
    if isinstance(checkpoint, Fp4Checkpoint) or checkpoint.scheme.order or spec.part is not None:
        return {}
    suffix = integer_files.order_suffix(checkpoint.packing)
    if suffix is None or f"{module}.{suffix}" not in entries:
        return {}
    return {suffix: _find(spec, entries, f"{module}.{suffix}", (columns,))}


def _check_values(pieces: list[PackedRoute], *, one_order: bool) -> None:
    """What only the values of small tensors tell. Raises ModelError for an order of columns that is none, or that the
    configuration denies, or, of `one_order`, not that of the matrices beside it, and for a factor that is no finite
    number above zero.
    """
    orders = []
    for piece in pieces:
        if isinstance(piece.checkpoint, Fp4Checkpoint):
            for entry in piece.entries.values():
                if entry.shape in ((), (1,)):
                    fp4_files.check_factor(read_bytes(entry).view(PLAIN_DTYPES[entry.encoding]), entry.name)
            continue
        suffix = integer_files.order_suffix(piece.checkpoint.packing)
        if (said := {**piece.said, **piece.entries}.get(suffix or "")) is not None:
            groups = read_bytes(said).view(READABLE_DTYPES[said.encoding])
            orders.append(integer_files.column_order(groups, piece.checkpoint, said.name))
    for piece, order in zip(pieces[1:], orders[1:] if one_order else (), strict=False):
        if not torch.equal(order, orders[0]):
            raise ModelError(
                f"{pieces[0].module} and {piece.module} are one matrix here, but their g_idx differ: quantize them "
                "with the same order of columns, or without act-order.",
                param="quantization_config",
            )


def encodings(checkpoint: PackedCheckpoint, suffix: str) -> tuple[str, ...]:
    """safetensors' dtypes that the tensor of a weight may have."""
    if isinstance(checkpoint, Fp4Checkpoint):
        return fp4_files.encodings(checkpoint, suffix)
    return integer_files.encodings(suffix)


def _find(spec: ModelSpec, entries: Entries, name: str, shape: tuple[int, ...]) -> TensorEntry:
    """One number may have a dimension or none."""
    there = entries.get(name)
    single = shape == () and there is not None and there.shape == (1,)
    return find_entry(entries, name, (1,) if single else shape, spec.architecture)


def load_packed(arena: WeightArena, plan: Mapping[str, tuple[PackedRoute, ...]], lanes: CopyLanes) -> None:
    """Read every weight of the plan and lay it out in the arena. Raises ModelError."""
    waiting: tuple[str, tuple[PackedRoute, ...], list[dict[str, Tensor]], list[Future[None]]] | None = None
    for name, routes in plan.items():
        lanes.fence()
        read, futures = _submit(lanes, routes, arena.device)
        if waiting is not None:
            _store(arena, lanes, *waiting)
        waiting = (name, routes, read, futures)
    if waiting is not None:
        _store(arena, lanes, *waiting)


def _submit(
    lanes: CopyLanes, routes: tuple[PackedRoute, ...], device: torch.device
) -> tuple[list[dict[str, Tensor]], list[Future[None]]]:
    read: list[dict[str, Tensor]] = []
    futures: list[Future[None]] = []
    for route in routes:
        tensors = {}
        for suffix, entry in route.entries.items():
            tensors[suffix] = torch.empty(entry.shape, dtype=READABLE_DTYPES[entry.encoding], device=device)
            futures += lanes.submit_plain(entry, tensors[suffix])
        read.append(tensors)
    return read, futures


def _store(
    arena: WeightArena,
    lanes: CopyLanes,
    name: str,
    routes: tuple[PackedRoute, ...],
    read: list[dict[str, Tensor]],
    futures: list[Future[None]],
) -> None:
    lanes.join(futures)
    experts = arena.experts.get(name)
    groups = _groups(arena.spec, name)
    order = torch.tensor(row_order(groups), device=arena.device) if groups else None
    rows = [0] if groups else [route.row for route in routes]
    kept, checkpoint = not arena.spec.requantized, routes[0].checkpoint
    if kept and isinstance(checkpoint, Fp4Checkpoint) and isinstance(experts, Fp4Experts):
        _store_fp4_experts(experts, checkpoint, routes, read)
        return
    if name in arena.dense:
        _widen(arena.dense[name], routes, read)
        return
    if arena.spec.requantized:
        _requantize(arena, name, routes, read, order)
        return
    if isinstance(checkpoint, Fp4Checkpoint):
        floats = [fp4_files.unpack(checkpoint, tensors) for tensors in read]
        floats = floats if order is None else [fp4_files.in_order(floats, order)]
        try:
            for row, each in zip(rows, floats, strict=True):
                arena.store_fp4(name, row, each.data, each.scale, each.factor)
        except ValueError as error:
            raise ModelError(f"{' or '.join(route.module for route in routes)} {error}.") from error
        return
    pieces = list(_unpacked(arena.spec, name, routes, read))
    if isinstance(experts, IntegerExperts):
        for route, piece in zip(routes, pieces, strict=True):
            experts.store(route.row, piece.codes, piece.scale, piece.zero)
        return
    place = arena.integers[name]
    pieces = pieces if order is None else [integer_files.in_order(pieces, order)]
    for row, piece in zip(rows, pieces, strict=True):
        arena.store_integers(name, row, piece.codes, piece.scale, piece.zero)
    if place.order is not None:
        # The order of all pieces, as the plan has found; of no groups' own, the file's.
        columns = next((piece.order for piece in pieces if piece.order is not None), None)
        every = torch.arange(place.in_features, dtype=torch.int32, device=place.data.device)
        place.order.copy_(every if columns is None else columns)


def _unpacked(
    spec: ModelSpec, name: str, routes: tuple[PackedRoute, ...], read: list[dict[str, Tensor]]
) -> Iterator[integer_files.Unpacked]:
    """The pieces of a matrix in integers, all in the scheme that it rests in."""
    whole = spec.checkpoint_of(name)
    for route, tensors in zip(routes, read, strict=True):
        assert isinstance(route.checkpoint, IntegerCheckpoint), "pieces are all integers or all floats"
        assert isinstance(whole, IntegerCheckpoint), "and so is what they rest in"
        piece = integer_files.unpack(route.checkpoint, tensors, route.module)
        yield integer_files.in_scheme(piece, route.checkpoint.scheme, whole.scheme)


def _requantize(
    arena: WeightArena,
    name: str,
    routes: tuple[PackedRoute, ...],
    read: list[dict[str, Tensor]],
    order: Tensor | None,
) -> None:
    """The numbers of a matrix in the model's type, which become what the arena has a place for."""
    whole: Tensor | None = None
    for route, tensors in zip(routes, read, strict=True):
        numbers = _values(route, tensors)
        if whole is None:
            size = (sum(each.rows for each in routes), numbers.shape[1])
            whole = torch.empty(size, dtype=arena.dtype, device=arena.device)
        whole[route.row : route.row + route.rows].copy_(numbers)
    assert whole is not None, "a matrix has pieces"
    arena.quantize(name, whole if order is None else whole[order])


def _values(route: PackedRoute, tensors: Mapping[str, Tensor]) -> Tensor:
    """The numbers of a piece, fp32 [rows, K]."""
    if isinstance(route.checkpoint, Fp4Checkpoint):
        return fp4_files.values(route.checkpoint, tensors)
    return integer_files.values(route.checkpoint, tensors, route.module)


def _widen(target: Tensor, routes: tuple[PackedRoute, ...], read: list[dict[str, Tensor]]) -> None:
    """In 16 bits what widens latents, which both ways to attend read head by head, and experts with orders of their
    own.
    """
    for route, tensors in zip(routes, read, strict=True):
        target[route.row : route.row + route.rows].copy_(_values(route, tensors))


def _store_fp4_experts(
    place: Fp4Experts, checkpoint: Fp4Checkpoint, routes: tuple[PackedRoute, ...], read: list[dict[str, Tensor]]
) -> None:
    """Some experts at once, of which each has as many routes: to lay out one alone would be launches more than work."""
    each = len(routes) // len(place.data)
    for first in range(0, len(place.data), place.together):
        span = slice(first * each, (first + place.together) * each)
        pieces = [fp4_files.unpack(checkpoint, tensors) for tensors in read[span]]
        factors = [
            piece.factor.expand(route.rows)
            for route, piece in zip(routes[span], pieces, strict=True)
            if piece.factor is not None
        ]
        try:
            place.store(
                first,
                torch.cat([piece.data for piece in pieces]),
                torch.cat([piece.scale.t() for piece in pieces]),
                torch.cat(factors) if factors else None,
            )
        except ValueError as error:
            raise ModelError(f"{routes[span][0].module} or an expert behind it {error}.") from error
