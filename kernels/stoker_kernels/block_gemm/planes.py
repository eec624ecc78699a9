"""Brings GGUF's blocks into planes, and back to their fields: PyTorch, on any device.

Invariants: exact both ways; a call takes of memory a small multiple of the codes that it is given, so its caller cuts
large weights into rows. The layout is that of `quant.block_planes`.
Knows nothing of products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.block_gemm.fields import Fields, fields_of
from stoker_kernels.quant import (
    BLOCK_FORMATS,
    PLANE_KINDS,
    STEP,
    TAIL,
    TAIL_PLACES,
    PlaneKind,
    PlaneRows,
    element_bits,
    steps_and_tails,
)

PACKED_AT_ONCE = 1 << 24
"""Codes that are laid out together: each takes about ten bytes meanwhile."""


def store_planes(place: PlaneRows, row: int, data: Tensor) -> None:
    """Lay out rows from `row` on: blocks as a file has them, uint8 [rows, row bytes], on the device of `place`."""
    at_once = max(1, PACKED_AT_ONCE // place.columns)
    for first in range(0, data.shape[0], at_once):
        _store(place, row + first, data[first : first + at_once])


def _store(place: PlaneRows, row: int, data: Tensor) -> None:
    kind, count = PLANE_KINDS[place.format], data.shape[0]
    fields = fields_of(data.reshape(-1, BLOCK_FORMATS[place.format][1]), place.format)
    rows = slice(row, row + count)
    codes = _filled(fields.codes.view(count, place.columns))
    place.low[rows].copy_(_packed(codes & (1 << kind.low) - 1, kind.low, kind.words, place.columns))
    if place.high is not None:
        place.high[rows].copy_(_packed(codes >> kind.low, kind.high, kind.words, place.columns))
    if place.factor is not None:
        second = torch.zeros_like(fields.factor) if fields.low_factor is None else fields.low_factor
        both = torch.cat([fields.factor, second], dim=1).view(torch.int32)
        place.factor[:, rows] = both.view(count, -1).t()
    steps, tails = _scale_views(place)
    for target, words in zip((steps, tails), _scale_words(fields, kind, count, place.columns), strict=True):
        if words is not None:
            target[:, :, rows] = words.permute(1, 2, 0)


def _filled(codes: Tensor) -> Tensor:
    """Columns [N, K] with zeros behind up to a whole tail."""
    missing = -codes.shape[1] % TAIL
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes


def _packed(codes: Tensor, bits: int, words: int, columns: int) -> Tensor:
    """Codes uint8 [N, K] of so many bits → bytes of a plane's rows."""
    rows, (steps, tails) = codes.shape[0], steps_and_tails(columns)
    wide = element_bits(bits, words)
    whole = codes[:, : steps * STEP].reshape(rows, steps * STEP // words * bits // wide, wide // bits, words)
    rest = codes[:, steps * STEP :].reshape(rows, tails, TAIL_PLACES, TAIL // TAIL_PLACES)
    return torch.cat([_elements(part, bits, wide) for part in (whole, rest)], dim=1)


def _elements(codes: Tensor, bits: int, wide: int) -> Tensor:
    """[N, tiles, places, words] → bytes [N, ·]."""
    found = torch.zeros((*codes.shape[:2], codes.shape[3]), dtype=torch.int32, device=codes.device)
    for place in range(codes.shape[2]):
        found |= codes[:, :, place].int() << bits * place
    return found.to(torch.int16 if wide == 16 else torch.uint8).view(torch.uint8).flatten(1)


def _scale_views(place: PlaneRows) -> tuple[Tensor, Tensor]:
    """`scale` of steps [steps, words, N] and of tails [tails, words, N]."""
    kind, (steps, tails) = PLANE_KINDS[place.format], steps_and_tails(place.columns)
    first, rest = place.scale.split([place.rows * steps * kind.scale_words, place.rows * tails * kind.tail_words])
    return first.view(steps, kind.scale_words, place.rows), rest.view(tails, kind.tail_words, place.rows)


def _scale_words(fields: Fields, kind: PlaneKind, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    """Words of the rows' scales, int64 [N, steps, words] and [N, tails, words]."""
    if fields.scales is not None:
        scales = fields.scales.view(torch.uint8).view(rows, -1, kind.places)
        if fields.lows is not None:
            lows = fields.lows.view(rows, -1, kind.places)
            scales = scales | lows << 4 if kind.nibbles else torch.cat([scales, lows], dim=2)
        return _dense(scales).view(torch.int64), None
    parts = [each.view(rows, -1) for each in (fields.factor, fields.low_factor) if each is not None]
    (steps, tails), per_step = steps_and_tails(columns), STEP // kind.words
    whole = [each[:, : steps * per_step].reshape(rows, steps, per_step) for each in parts]
    # A tail's places are half of a block each; what a row lacks at its end has the scale 0.
    rest = [each[:, steps * per_step :].repeat_interleave(2, dim=1) for each in parts]
    rest = [torch.nn.functional.pad(each, (0, -each.shape[1] % TAIL_PLACES)) for each in rest]
    rest = [each.reshape(rows, tails, TAIL_PLACES) for each in rest]
    words = (_dense(torch.cat(each, dim=2)).view(torch.int64) for each in (whole, rest))
    return next(words), next(words)


def fields_of_planes(place: PlaneRows) -> Fields:
    """The fields that rows in planes were made of, of blocks that are one format's, or of 32 columns."""
    kind, rows = PLANE_KINDS[place.format], place.rows
    codes = _unpacked(place.low, kind.low, kind.words, place.columns)
    if place.high is not None:
        codes |= _unpacked(place.high, kind.high, kind.words, place.columns) << kind.low
    codes = codes[:, : place.columns].contiguous()
    steps, tails = (_dense(each.permute(2, 0, 1)) for each in _scale_views(place))
    if place.factor is not None:
        both = _dense(place.factor.t()).view(torch.float16).view(-1, 2)
        low_factor = both[:, 1:] if kind.mins else None
        found = steps.view(torch.uint8).view(rows * steps.shape[1], -1)
        if kind.nibbles:
            return Fields(codes.view(-1, STEP), both[:, :1], low_factor, found & 15, found >> 4)
        scales, lows = found[:, : kind.places].contiguous(), found[:, kind.places :] if kind.mins else None
        scales = scales if kind.mins else scales.view(torch.int8)
        return Fields(codes.view(-1, STEP), both[:, :1], low_factor, scales, lows)
    halves = 2 if kind.mins else 1
    whole = steps.view(torch.float16).view(rows, steps.shape[1], halves, kind.places)
    rest = tails.view(torch.float16).view(rows, tails.shape[1], halves, TAIL_PLACES)[..., ::2]
    blocks = codes.view(-1, kind.words)
    found_, *low = (
        torch.cat([whole[:, :, at].flatten(1), rest[:, :, at].flatten(1)], dim=1)[
            :, : place.columns // kind.words
        ].reshape(-1, 1)
        for at in range(halves)
    )
    return Fields(blocks, found_, low[0] if low else None)


def _dense(view: Tensor) -> Tensor:
    """A copy in its own order: `contiguous` leaves views of one row, or of nothing, with strides that no view takes."""
    return view.clone(memory_format=torch.contiguous_format)


def _unpacked(plane: Tensor, bits: int, words: int, columns: int) -> Tensor:
    """Bytes of a plane's rows → codes uint8 [N, K], and what a last tail has beyond."""
    rows, (steps, tails) = plane.shape[0], steps_and_tails(columns)
    wide = element_bits(bits, words)
    elements = plane.view(torch.int16 if wide == 16 else torch.uint8).int()
    split = steps * STEP * bits // wide
    whole = elements[:, :split].reshape(rows, split // words, 1, words)
    rest = elements[:, split:].reshape(rows, tails, 1, TAIL // TAIL_PLACES)
    found = []
    for part, places in ((whole, wide // bits), (rest, TAIL_PLACES)):
        shifts = bits * torch.arange(places, device=plane.device).view(-1, 1)
        found.append((part >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1))
    return torch.cat(found, dim=1)
