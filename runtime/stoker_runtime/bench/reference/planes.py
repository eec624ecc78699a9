"""The numbers of GGUF's blocks in planes, each found by where its bits lie: a part of the oracle `reference.model`.

Invariants: shares the types of weights with the engine, and none of its packing or unpacking; what a call takes beside
its result is about 60 bytes for each of at most DECODED_AT_ONCE numbers, however large the weight.
Knows nothing of products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.quant import PLANE_KINDS, PlaneRows

STEP, TAIL, TAIL_PLACES, TAIL_WORDS = 256, 64, 4, 16
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


DECODED_AT_ONCE = 1 << 22


def plane_values(piece: PlaneRows) -> Tensor:
    """fp32 `[N, K]`."""
    values = torch.empty((piece.rows, piece.columns), dtype=torch.float32, device=piece.device)
    for part in torch.arange(piece.rows, device=piece.device).split(max(1, DECODED_AT_ONCE // piece.columns)):
        values[part[0] : part[-1] + 1] = plane_rows(piece, part)
    return values


def plane_rows(piece: PlaneRows, rows: Tensor) -> Tensor:
    """fp32 `[R, K]`: the rows `rows` `[R]` int64."""
    kind, device = PLANE_KINDS[piece.format], piece.device
    column = torch.arange(piece.columns, device=device)
    step, whole = column // STEP, column < piece.columns // STEP * STEP
    tail = column % STEP // TAIL
    place = torch.where(whole, column % STEP // kind.words, column % TAIL // TAIL_WORDS)
    word = torch.where(whole, column % kind.words, column % TAIL_WORDS)
    codes = _bits(piece.low[rows], kind.low, kind.words, step, whole, tail, place, word)
    if piece.high is not None:
        codes += _bits(piece.high[rows], kind.high, kind.words, step, whole, tail, place, word) << kind.low
    values = torch.tensor(IQ4, device=device)[codes].float() if kind.levels else codes.float() - kind.offset
    each = kind.scale_words // (2 if kind.mins and not kind.nibbles else 1)
    per_word = 8 if kind.bytes_ else 4
    lacking = kind.tail_words // 2 if kind.mins else 0

    def word_of(second: bool) -> Tensor:
        """Where the word of each column's scale lies, of row 0: [K], in words of a row's step or tail."""
        in_step = step * kind.scale_words + place // per_word + (each if second else 0)
        in_tail = piece.columns // STEP * kind.scale_words + tail * kind.tail_words + (lacking if second else 0)
        return torch.where(whole, in_step, in_tail)

    if not kind.bytes_:
        scale = _number(piece, rows, word_of(False), torch.float16, place % 4)
        return scale * values + (_number(piece, rows, word_of(True), torch.float16, place % 4) if kind.mins else 0.0)
    assert piece.factor is not None, "scales of a byte have factors"
    both_factors = piece.factor[:, rows][step].t().contiguous().view(torch.float16).view(*codes.shape, 2)
    factor, least = both_factors.float().unbind(-1)
    if kind.nibbles:
        both = _number(piece, rows, word_of(False), torch.uint8, place % 8).int()
        return factor * (both & 15) * values - least * (both >> 4)
    scale = _number(piece, rows, word_of(False), torch.uint8 if kind.mins else torch.int8, place % 8)
    values = factor * scale * values
    return values - least * _number(piece, rows, word_of(True), torch.uint8, place % 8) if kind.mins else values


def _bits(
    plane: Tensor, bits: int, words: int, step: Tensor, whole: Tensor, tail: Tensor, place: Tensor, word: Tensor
) -> Tensor:
    """The bits of each column's code, int64 [R, K]."""
    size = min(16, STEP // words * bits) // 8
    per, a_step = 8 * size // bits, STEP * bits // (8 * size)
    # Tails begin behind all whole steps.
    behind = int(whole.sum()) // STEP * a_step + tail * TAIL_WORDS + word
    element = torch.where(whole, step * a_step + place // per * words + word, behind)
    shift = bits * torch.where(whole, place % per, place)
    found = sum(plane[:, element * size + at].long() << 8 * at for at in range(size))
    assert isinstance(found, Tensor)
    return found >> shift & (1 << bits) - 1


def _number(piece: PlaneRows, rows: Tensor, words: Tensor, dtype: torch.dtype, at: Tensor) -> Tensor:
    """The number `at` of each column's word, fp32 [R, K]: words of a step follow each other by rows."""
    numbers = piece.scale[words.unsqueeze(0) * piece.rows + rows.unsqueeze(1)].contiguous().view(dtype)
    numbers = numbers.view(len(rows), piece.columns, -1)
    return numbers.gather(2, at.view(1, -1, 1).expand(len(rows), -1, 1)).squeeze(2).float()
