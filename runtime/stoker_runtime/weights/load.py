"""Loads the weights of any source into one arena: safetensors, GGUF, or random numbers of a shape.

Invariants: names, shapes and lengths are checked before a byte is moved; each tensor goes straight to its final
rows. With quantization, a layer's matrix rests in scratch memory only until it is quantized, so the peak is the
quantized model plus PENDING_BYTES, or a quarter of a model that is smaller, and one matrix in fp32.
Knows nothing of how the decoder computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.checkpoint.safetensors_index import read_checkpoint_index
from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import ROWS
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.draft_heads.spec import HeadSpec
from stoker_runtime.models.parameter import Parameter, stored_kind
from stoker_runtime.models.quantization.fp4_scheme import EXPERTS_KIND
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES, READABLE_DTYPES, CopyLanes
from stoker_runtime.weights.entries_apart import brought_apart, experts_apart
from stoker_runtime.weights.fp8_scales import (
    ENCODINGS,
    ScaleCopies,
    ScaleRoute,
    plan_scales,
    split_scales,
    widen,
    with_scales,
)
from stoker_runtime.weights.gguf_decode import make_decoder
from stoker_runtime.weights.kv_scales import KvScales, read_kv_scales, split_kv_scales
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.packed import mxfp4
from stoker_runtime.weights.packed.announce import announce, announce_widened
from stoker_runtime.weights.packed.experts_load import check_experts, load_experts
from stoker_runtime.weights.packed.load import PackedRoute, load_packed, plan_packed, taken_names
from stoker_runtime.weights.packed.requantize import as_stored
from stoker_runtime.weights.random import fill_random
from stoker_runtime.weights.rank_cut import RankCut
from stoker_runtime.weights.routing import Route, Vocabulary, route
from stoker_runtime.weights.upload_ahead import UploadAhead

# Unquantized matrices in flight while quantizing: a few of a 7B model's, so that reading never waits for them.
PENDING_BYTES = 1024**3
# What begins the names of output heads, which no base model has.
HEADS = ("lm_head.", "embed_out.", "output.")

Routes = dict[str, tuple[Route, ...]]
Scales = dict[str, tuple[ScaleRoute, ...]]
Integers = dict[str, tuple[PackedRoute, ...]]
# What is done once the copies to scratch memory, of so many bytes, are done.
Pending = tuple[Callable[[], None], int, list[Future[None]]]


def load_weights(
    model: str | ModelSource,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str = "none",
    *,
    seed: int = 0,
    ahead: UploadAhead | None = None,
    cut: RankCut | None = None,
) -> DecoderWeights:
    """Load `model` (a folder, a .gguf file, `shape:NAME`, or its source) as `dtype` onto `device`.

    `quantization` "fp8" stores the layers' matrices as e4m3 with a scale per output channel, "w4" in four bits with a
    scale and a zero point for each 128 columns, "gguf" in the file's blocks, and "q8_0" or "q4k" in blocks made here,
    where the spec has them (`block_plan.keep_blocks`); `seed` draws a shape's weights; `ahead` may hold the files'
    bytes on the device already, and is closed; `cut` says which part of the model `spec` is, of one rank among several.
    Raises ModelError naming the file and tensor that are missing, unknown, misshaped or cut short.
    """
    source = read_source(model) if isinstance(model, str) else model
    if source.path is None:
        arena = WeightArena(spec, device, dtype, quantization)
        fill_random(arena, seed, cut)
        return _settled(arena)
    routes, scales, integers, kv_scales = _routes(source.kind, source.path, spec, cut)
    calibrated = read_kv_scales(cut.whole if cut else spec, kv_scales, device)
    if cut is not None and calibrated is not None:
        calibrated = cut.cache_scales(calibrated)
    arena = WeightArena(spec, device, dtype, quantization)
    announce(arena, cut.whole if cut else spec)
    announce_widened(arena, integers)
    with CopyLanes(device, ahead) as lanes:
        _fill(arena, routes, scales, lanes)
        load_experts(arena, routes, lanes)
        load_packed(arena, integers, lanes)
    return replace(_settled(arena), kv_scales=calibrated)


def _settled(arena: WeightArena) -> DecoderWeights:
    """Give the scratch memory of conversion and quantization back, so that the arena is all that stays."""
    if arena.device.type == "cuda":
        torch.cuda.empty_cache()
    return arena.assemble()


def _routes(
    kind: SourceKind, path: Path, spec: ModelSpec, cut: RankCut | None = None
) -> tuple[Routes, Scales, Integers, KvScales]:
    if kind is SourceKind.GGUF:
        found = brought_apart(cut.whole if cut else spec, read_gguf_header(path).tensors)
        kv_scales, vocabulary = KvScales(), Vocabulary.GGUF
    else:
        row = ROWS[spec.architecture]
        entries = renamed(read_checkpoint_index(path), row.renamed)
        if isinstance(spec, HeadSpec) and spec.within:
            entries = {name: entry for name, entry in entries.items() if name.startswith(spec.within)}
            entries = renamed(entries, ((spec.within, "layers.0."),))
        entries = experts_apart(row, (cut.whole if cut else spec).num_layers, with_base(entries, row.base))
        found, kv_scales = split_kv_scales(entries)
        vocabulary = Vocabulary.HF
    if cut is not None:
        # The whole checkpoint is checked against the whole model; a part of it then fits the part of the model.
        _plan(cut.whole, found, vocabulary)
        found = cut.entries(found, vocabulary)
    return *_plan(spec, found, vocabulary), kv_scales


def _plan(spec: ModelSpec, found: dict[str, TensorEntry], vocabulary: Vocabulary) -> tuple[Routes, Scales, Integers]:
    if vocabulary is Vocabulary.GGUF:
        return route(spec, found, vocabulary), {}, {}
    widened, spec = spec.requantized, as_stored(spec)
    integers = plan_packed(spec, found)
    taken = taken_names(spec, integers, found)
    entries, scale_entries = split_scales(spec, {name: entry for name, entry in found.items() if name not in taken})
    routes = with_scales(spec, route(spec, entries, Vocabulary.HF, integers), scale_entries, all_widened=widened)
    check_experts(spec, routes)
    scales = plan_scales(spec, routes, scale_entries)
    scales = {} if widened else scales
    for parameter, pieces in routes.items():
        for piece in () if parameter in scales else pieces:
            if piece.scales is None and piece.entry.encoding not in PLAIN_DTYPES:
                raise ModelError(
                    f"{piece.entry.file}: tensor {piece.entry.name} is {piece.entry.encoding}; "
                    f"supported are {', '.join(PLAIN_DTYPES)}."
                )
    return routes, scales, integers


def renamed(entries: dict[str, TensorEntry], pairs: Sequence[tuple[str, str]]) -> dict[str, TensorEntry]:
    """Tensors by the names that the table has for them, which begin otherwise in files."""
    for old, new in pairs:
        names = [new + name.removeprefix(old) if name.startswith(old) else name for name in entries]
        entries = {name: replace(entry, name=name) for name, entry in zip(names, entries.values(), strict=True)}
    return entries


def with_base(entries: dict[str, TensorEntry], base: str) -> dict[str, TensorEntry]:
    """Tensors by the names of a whole model: one saved without its head leaves out their first part, `base`."""
    if any(name.startswith(base) for name in entries):
        return entries
    whole = (name if name.startswith(HEADS) else f"{base}{name}" for name in entries)
    return {name: replace(entry, name=name) for name, entry in zip(whole, entries.values(), strict=True)}


def _fill(arena: WeightArena, routes: Routes, scales: Scales, lanes: CopyLanes) -> None:
    """Submit every copy in order; quantize each matrix that the checkpoint does not hold in FP8 once it is whole."""
    copies: list[Future[None]] = []
    scale_copies = ScaleCopies(lanes, arena.device)
    pending: deque[Pending] = deque()
    for parameter in arena.spec.parameters():
        stored = stored_kind(parameter, arena.quantization)
        if parameter.name not in routes or stored == EXPERTS_KIND:
            continue
        if parameter.blocks and parameter.name not in arena.spec.made:
            kept, waiting = _keep_blocks(arena, parameter, routes[parameter.name], lanes)
            copies += kept
            _wait_for(lanes, pending, waiting, arena.num_bytes)
            continue
        target = _target(arena, parameter)
        lanes.fence()
        futures = [future for piece in routes[parameter.name] for future in _submit(lanes, piece, target)]
        if parameter.name in scales:
            place = arena.quantized[parameter.name]
            assert place.scale is not None, "a weight in FP8 has a scale"
            copies += futures + scale_copies.submit(scales[parameter.name], place.kind, place.scale)
        elif stored == "dense":
            copies += futures
        else:
            done = partial(arena.quantize, parameter.name, target)
            _wait_for(lanes, pending, [(done, target.nbytes, futures)], arena.num_bytes)
    _wait_for(lanes, pending, [], 0)
    lanes.join(copies)
    scale_copies.finish()


def _wait_for(lanes: CopyLanes, pending: deque[Pending], more: list[Pending], weights: int) -> None:
    """Add what waits for its copies, and finish the oldest until few bytes, of so many of weights, are waiting."""
    pending.extend(more)
    del more
    most = min(PENDING_BYTES, weights // 4)
    while pending and sum(size for _, size, _ in pending) > most:
        done, _, futures = pending.popleft()
        lanes.join(futures)
        done()


def _keep_blocks(
    arena: WeightArena, parameter: Parameter, pieces: tuple[Route, ...], lanes: CopyLanes
) -> tuple[list[Future[None]], list[Pending]]:
    """Bring a matrix's blocks to their place; and what becomes planes once it is there, for which it waits."""
    weight = arena.blocks[parameter.name]
    if not weight.in_planes:
        places = zip(pieces, weight.blocks, strict=True)
        return [each for piece, rows in places for each in _submit_blocks(lanes, piece, rows.data)], []
    waiting: list[Pending] = []
    for piece in pieces:
        shape = (piece.shape[0], piece.entry.num_bytes // piece.shape[0])
        raw = torch.empty(shape, dtype=torch.uint8, device=arena.device)
        lanes.fence()
        done = partial(arena.store_blocks, parameter.name, piece.row, raw)
        waiting.append((done, raw.nbytes, _submit_blocks(lanes, piece, raw)))
    return [], waiting


def _submit_blocks(lanes: CopyLanes, piece: Route, place: Tensor) -> list[Future[None]]:
    """Copy a piece's rows as they lie in the file, in this decoder's order."""
    half = piece.head_rows // 2

    def in_order(raw: Tensor) -> Tensor:
        rows = raw.view(-1, place.shape[1])
        return rows.view(-1, half, 2, place.shape[1]).transpose(1, 2).reshape(rows.shape) if half else rows

    return lanes.submit_decoded(piece.entry, place, piece.head_rows or 1, in_order)


def _target(arena: WeightArena, parameter: Parameter) -> Tensor:
    if parameter.name in arena.quantized and parameter.kind:
        return arena.quantized[parameter.name].data
    if stored_kind(parameter, arena.quantization) != "dense":
        return torch.empty(parameter.shape, dtype=arena.dtype, device=arena.device)
    return arena.dense[parameter.name]


def _submit(lanes: CopyLanes, piece: Route, target: Tensor) -> list[Future[None]]:
    rows = target[piece.row : piece.row + piece.shape[0]]
    if piece.entry.encoding in READABLE_DTYPES and piece.is_plain:
        return lanes.submit_plain(piece.entry, rows)
    return lanes.submit_decoded(piece.entry, rows, piece.together, _decoder(piece))


def _numbers(piece: Route) -> Callable[[Tensor], Tensor]:
    """A function from the bytes of whole rows to their numbers, as they lie."""
    scales = piece.scales
    if scales is not None and piece.entry.encoding in ENCODINGS.values():
        return lambda raw: widen(raw, piece.entry.encoding, piece.shape, scales)
    if scales is not None:
        return lambda raw: mxfp4.decode(raw, mxfp4.read_bytes(scales))
    if piece.entry.encoding not in READABLE_DTYPES or piece.head_rows:
        return make_decoder(piece.entry, piece.head_rows)
    dtype = READABLE_DTYPES[piece.entry.encoding]
    return lambda raw: raw.view(dtype)


def _decoder(piece: Route) -> Callable[[Tensor], Tensor]:
    """A function from the bytes of whole rows to the numbers that go to their place."""
    numbers = _numbers(piece)

    def decode(raw: Tensor) -> Tensor:
        found = numbers(raw)
        if piece.transposed:
            found = found.view(piece.shape[::-1]).t().contiguous()
        if piece.paired:
            found = found.view(piece.shape[0] // 2, 2, -1).transpose(0, 1).contiguous()
        if piece.logarithm:
            found = found.float().neg().log()
        if piece.normed:
            found = functional.normalize(found.float().view(-1, piece.shape[1]))
        return found.float() + piece.offset if piece.offset else found

    return decode
