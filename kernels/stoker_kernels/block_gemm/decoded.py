"""Products of many tokens with GGUF's planes on Hopper: rows are decoded to bf16 (`sm90_rows`), then multiplied as a
dense weight, by whatever the op `linear` takes for one.

Decoding is bound by bytes, of the planes and twice those of the rows in 16 bits; what it takes does not depend on the
tokens.
Invariants: a call takes at most SCRATCH_BYTES beside its result, or rows of one tile; captured after one call of its
shape. The product is launched only when the rows are there: a kernel of ours asks for a weight before it waits.
Does not know: which products come here (`plane_choose`), nor how a dense weight is multiplied.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from stoker_kernels.block_gemm import sm90_rows
from stoker_kernels.launch.dispatch import ops, select, sm_of
from stoker_kernels.launch.pdl import plain_launches
from stoker_kernels.quant import BlockWeight, LinearWeight

DECODED_FROM = 65
"""Tokens from which on a product comes here: up to 64 reading planes once or twice takes less."""
SCRATCH_BYTES = 128 << 20
"""Rows in 16 bits at a time. More than the L2 holds: few rows would leave SMs idle in a product of few tokens."""
TILE_ROWS = 128


def decodes(x: Tensor, weight: BlockWeight) -> bool:
    """Whether x [T, K] is multiplied with decoded rows."""
    return len(x) >= DECODED_FROM and refusal(x, weight) is None


def refusal(x: Tensor, weight: BlockWeight) -> str | None:
    """None where the weight's rows can be decoded for x, else why not."""
    missing = sm90_rows.device_refusal(x.dtype, sm_of(x.device))
    return missing or next((reason for each in weight.planes if (reason := sm90_rows.piece_refusal(each))), None)


def part_rows(rows: int, columns: int, spans: int = 1) -> int:
    """Rows of each of `spans` that are decoded at a time: all, or equal parts in whole tiles."""
    each = spans * columns * 2
    if rows * each <= SCRATCH_BYTES:
        return rows
    tiles, at_once = -(-rows // TILE_ROWS), max(1, SCRATCH_BYTES // (each * TILE_ROWS))
    parts = -(-tiles // at_once)
    return -(-tiles // parts) * TILE_ROWS


def decode_rows(weight: BlockWeight, out: Tensor, *, first: int) -> None:
    """out [R, K] = rows of the weight from `first` on, of all pieces that they lie in."""
    begins = 0
    for piece in weight.planes:
        begin, end = max(first, begins), min(first + len(out), begins + piece.rows)
        if begin < end:
            sm90_rows.decode(piece, out[begin - first : end - first], first=begin - begins)
        begins += piece.rows


@functools.cache
def _register_all() -> None:
    ops()


def linear(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor) -> None:
    """out = x · Wᵀ + bias, for operands that `refusal` accepts. Raises CubinMissing."""
    _register_all()
    rows, columns = weight.out_features, weight.in_features
    at_once = part_rows(rows, columns)
    scratch = torch.empty((at_once, columns), dtype=x.dtype, device=x.device)
    for first in range(0, rows, at_once):
        part = scratch[: min(at_once, rows - first)]
        own = slice(first, first + len(part))
        decode_rows(weight, part, first=first)
        with plain_launches():
            dense = select("linear", x.device, x.dtype)
            dense(x, LinearWeight(part), bias=None if bias is None else bias[own], out=out[:, own])
