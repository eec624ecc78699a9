"""Log-probabilities in Triton: one pass over the logits by tiles, then one program a row.

Invariants: fp32, relative to each tile's maximum, so nothing overflows; tiles are summed in a fixed order.
Knows nothing of how tokens were chosen.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_ANYWHERE, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.sampling.state import TILE, padded_tiles, tiles_ahead
from stoker_kernels.sampling.triton_device import finite


@kernel
def _tile_kernel(
    logits, tokens, tile_max, tile_sum, tile_rank, vocab, tiles, TILE: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    """Of each tile: the maximum, Σ exp(x − maximum), and how many logits exceed the chosen token's."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tl.load(tokens + row)
    line = logits + row.to(tl.int64) * vocab
    index = tile * TILE + tl.arange(0, TILE)
    value = finite(tl.load(line + index, mask=index < vocab, other=float("-inf")))
    chosen = finite(tl.load(line + tl.maximum(token, 0)))
    best = tl.max(value, axis=0)
    shift = tl.where(best > float("-inf"), best, 0.0)
    place = row * tiles + tile
    tl.store(tile_max + place, best)
    tl.store(tile_sum + place, tl.sum(tl.exp(value - shift), axis=0))
    tl.store(tile_rank + place, tl.sum((value > chosen).to(tl.int32), axis=0))


@kernel
def _combine_kernel(
    logits,
    tokens,
    tile_max,
    tile_sum,
    tile_rank,
    packed,
    vocab,
    tiles,
    top,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """Sum the tiles; then `top` times: take the best tile's best logit that was not taken yet."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    line = logits + row.to(tl.int64) * vocab
    each = tl.arange(0, TILES)
    mine = each < tiles
    best = tl.load(tile_max + row * tiles + each, mask=mine, other=float("-inf"))
    sums = tl.load(tile_sum + row * tiles + each, mask=mine, other=0.0)
    rank = tl.sum(tl.load(tile_rank + row * tiles + each, mask=mine, other=0), axis=0) + 1
    peak = tl.max(best, axis=0)
    normalizer = peak + tl.log(tl.sum(sums * tl.exp(best - peak), axis=0))
    out = packed + row * (2 + 2 * top)
    if token < 0:
        for i in range(2 + 2 * top):
            tl.store(out + i, float("nan"))
    else:
        tl.store(out, finite(tl.load(line + token)) - normalizer)
        tl.store(out + 1, rank.to(tl.float32))
        # What was taken from a tile last: all before it, by falling value and rising id, is taken.
        last_value = tl.full([TILES], float("inf"), tl.float32)
        last_id = tl.full([TILES], -1, tl.int32)
        for i in range(top):
            value, tile = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
            hit = each == tile
            value_before = tl.min(tl.where(hit, last_value, float("inf")), axis=0)
            id_before = tl.max(tl.where(hit, last_id, -1), axis=0)
            index = tile * TILE + tl.arange(0, TILE)
            logit = finite(tl.load(line + index, mask=index < vocab, other=float("-inf")))
            free = (logit < value_before) | ((logit == value_before) & (index > id_before))
            chosen = tl.min(tl.where(free & (logit == value), index, 0x7FFFFFFF), axis=0)
            free = free & (index != chosen)
            best = tl.where(hit, tl.max(tl.where(free, logit, float("-inf")), axis=0), best)
            last_value = tl.where(hit, value, last_value)
            last_id = tl.where(hit, chosen, last_id)
            tl.store(out + 2 + i, chosen.to(tl.float32))
            tl.store(out + 2 + top + i, value - normalizer)


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """`sampling.token_logprobs` on CUDA."""
    if not logits.is_contiguous():
        raise ValueError("token_logprobs takes contiguous logits")
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    packed = torch.empty((rows, 2 + 2 * top), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return packed
    tile_max, tile_sum = torch.empty((2, rows, tiles), dtype=torch.float32, device=logits.device)
    tile_rank = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    scratch = (tile_max, tile_sum, tile_rank)
    options = launch_options(logits.device)
    _tile_kernel[(rows, tiles)](logits, tokens, *scratch, vocab, tiles, TILE=TILE, **options)
    _combine_kernel[(rows,)](
        logits,
        tokens,
        *scratch,
        packed,
        vocab,
        tiles,
        top,
        TILE=TILE,
        TILES=padded_tiles(tiles),
        **options,
    )
    return packed


def _register() -> None:
    scratch = {"tile_max": f"*{FP32}", "tile_sum": f"*{FP32}:1", "tile_rank": f"*{I32}"}
    for dtype, vocab in itertools.product((BF16, FP16, FP32), (I32_DIVISIBLE, I32)):
        inputs = {"logits": f"*{dtype}", "tokens": I32_ANYWHERE, "vocab": vocab, "tiles": I32} | scratch
        register_aot(_tile_kernel, inputs, [{"TILE": TILE}], compact=dtype == BF16)
        register_aot(
            _combine_kernel,
            inputs | {"packed": f"*{FP32}", "top": I32},
            [{"TILE": TILE, "TILES": tiles} for tiles in tiles_ahead(wide=dtype == BF16)],
            compact=dtype == BF16,
        )


_register()
