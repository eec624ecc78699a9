"""Loads experts that a checkpoint holds in MXFP4 and that stay so: read as they lie, laid out as kernels read them.

Invariants: nothing is dequantized. Reading the next layer's goes on while one is laid out on the device; what of a
layer is read rests in scratch memory as large as it. A scale that kernels do not take is a ModelError that names the
tensor.
Knows nothing of how products are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from stoker_runtime.errors import ModelError
from stoker_runtime.models.quantization.fp4_scheme import EXPERTS_KIND
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.copy_lanes import CopyLanes
from stoker_runtime.weights.expert_places import Fp4Experts
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.packed import mxfp4
from stoker_runtime.weights.routing import Route

BLOCKS, SCALES = ("U8",), ("U8", "F8_E8M0")
"""safetensors' words for the bytes of codes, and of exponents."""
GGUF_BLOCKS = "MXFP4"
"""GGUF's word for both in one."""

Routes = Mapping[str, tuple[Route, ...]]
# A piece of an expert as it is read: codes and exponents, or GGUF's blocks of both.
Raw = tuple[Route, Tensor, Tensor | None]


def check_experts(spec: ModelSpec, routes: Routes) -> None:
    """Raises ModelError where codes or exponents of experts in MXFP4 are of another type than bytes."""
    for parameter in spec.parameters():
        if parameter.kind == EXPERTS_KIND:
            for piece in routes[parameter.name][:1]:
                for entry, known in ((piece.entry, BLOCKS), (piece.scales, SCALES)):
                    if entry is not None and entry.encoding not in known:
                        raise ModelError(
                            f"{entry.file}: tensor {entry.name} is {entry.encoding}; it must be {', '.join(known)}."
                        )


def load_experts(arena: WeightArena, routes: Routes, lanes: CopyLanes) -> None:
    """Read all experts that the arena keeps in MXFP4, and lay them out. Raises ModelError."""
    stacked = {each.name for each in arena.spec.parameters() if each.kind == EXPERTS_KIND}
    waiting: tuple[Fp4Experts, list[Raw], list[Future[None]]] | None = None
    for name, place in arena.experts.items():
        if name not in stacked or not isinstance(place, Fp4Experts):
            continue
        lanes.fence()
        raw, futures = _submit(lanes, routes[name], arena.device)
        if waiting is not None:
            _store(lanes, *waiting)
        waiting = (place, raw, futures)
    if waiting is not None:
        _store(lanes, *waiting)


def _submit(lanes: CopyLanes, pieces: tuple[Route, ...], device: torch.device) -> tuple[list[Raw], list[Future[None]]]:
    raw: list[Raw] = []
    futures: list[Future[None]] = []
    for piece in pieces:
        if piece.scales is None:
            found = _submit_blocks(lanes, piece, device)
            raw.append((piece, found[0], None))
            futures += found[1]
            continue
        blocks, scales = (
            torch.empty(each.shape, dtype=torch.uint8, device=device) for each in (piece.entry, piece.scales)
        )
        futures += lanes.submit_plain(piece.entry, blocks) + lanes.submit_plain(piece.scales, scales)
        raw.append((piece, blocks, scales))
    return raw, futures


def _submit_blocks(lanes: CopyLanes, piece: Route, device: torch.device) -> tuple[Tensor, list[Future[None]]]:
    """A piece of a GGUF file, as it lies. Raises ModelError where it is no MXFP4, though the first layer's are."""
    entry = piece.entry
    if entry.encoding != GGUF_BLOCKS:
        raise ModelError(
            f"{entry.file}: tensor {entry.name} is {entry.encoding}, where experts of the first layer are "
            f"{GGUF_BLOCKS}; all must be, or serve the file with --quantization none."
        )
    blocks = torch.empty((piece.shape[0], entry.num_bytes // piece.shape[0]), dtype=torch.uint8, device=device)
    return blocks, lanes.submit_plain(replace(entry, encoding=BLOCKS[0], shape=tuple(blocks.shape)), blocks)


def _store(lanes: CopyLanes, place: Fp4Experts, raw: list[Raw], futures: list[Future[None]]) -> None:
    lanes.join(futures)
    pieces = len(raw) // place.data.shape[0]
    for expert in range(place.data.shape[0]):
        parts = raw[expert * pieces : (expert + 1) * pieces]
        codes, exponents = (torch.cat(each) for each in zip(*map(_apart, parts), strict=True))
        try:
            place.store(expert, codes, exponents)
        except ValueError as error:
            named = parts[0][0].scales or parts[0][0].entry
            raise ModelError(f"{named.file}: tensor {named.name}, expert {expert}, {error}.") from error


def _apart(part: Raw) -> tuple[Tensor, Tensor]:
    """Codes [rows, K / 2] and exponents [rows, K / 32] of a piece."""
    piece, blocks, scales = part
    if scales is None:
        return mxfp4.from_gguf(blocks)
    rows = piece.shape[0]
    codes, exponents = (_in_order(each.view(rows, -1), paired=piece.paired) for each in (blocks, scales))
    return codes, exponents


def _in_order(rows: Tensor, *, paired: bool) -> Tensor:
    """Rows with those of gate before those of up, which take turns where they are `paired`."""
    return rows.view(len(rows) // 2, 2, -1).transpose(0, 1).reshape(rows.shape) if paired else rows
