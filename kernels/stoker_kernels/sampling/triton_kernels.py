"""The sampling kernels: tiles' maxima, tiles' masses, and the choice.

Three launches, a grid fixed by rows and vocabulary. `tile_max_kernel` and `tile_mass_kernel` read the logits with a
program per row and tile. `choose_kernel`, a program a row, takes the argmax of greedy rows and the tile and then the
token of unfiltered ones. For top-k and top-p it searches the value of the last token kept: bisection over values that
occur (each pass moves a bound onto a logit, so it ends exactly), skipping tiles below the bound; once at most
CANDIDATES tokens are left they are gathered, in order of ids, and the rest of the search stays on chip.

Invariants: results do not depend on the tile size, on the order of programs or on the path of the search, because
they are defined by maxima and integer sums alone.
Knows nothing of dispatch or of how slots are filled.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.launch.pdl import pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.sampling.triton_device import (
    PENALIZED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    adjusted_logits,
    draw_point,
    finite,
    float_param,
    int_param,
    integer_weights,
    weight_scale,
)


@kernel
def tile_max_kernel(
    logits,
    row_slots,
    positions,
    fields,
    bias_ids,
    bias_values,
    bias_until,
    counts,
    bitmask,
    tile_max,
    tile_arg,
    vocab,
    tiles,
    MAX_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    ADJUST: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    tile = tl.program_id(1)
    slot = row * 0
    position = row * 0
    if ADJUST:
        slot = tl.load(row_slots + row)
        position = tl.load(positions + row)
    if slot >= 0:
        if ADJUST:
            value = adjusted_logits(
                logits, row, slot, tile * TILE, vocab, position, fields, bias_ids, bias_values, bias_until, counts,
                bitmask, MAX_BIAS, TILE, ADJUST,
            )  # fmt: skip
            best, index = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
        else:
            best, index = _plain_peak(logits + row.to(tl.int64) * vocab + tile * TILE, vocab - tile * TILE, TILE)
        tl.store(tile_max + row * tiles + tile, best)
        tl.store(tile_arg + row * tiles + tile, tile * TILE + index)


@triton.jit
def _plain_peak(logits, count, TILE: tl.constexpr):
    """(highest of `count` logits, the first place that has it); NaN and infinity as in `finite`.

    First the highest of every eight neighbours, which one thread has, two at a time; only these carry their places. A
    maximum passes over NaN, and is NaN where there is nothing else.
    """
    place = tl.arange(0, TILE)
    value = tl.load(logits + place, mask=place < count, other=float("-inf"))
    highest = finite(tl.max(tl.reshape(value, (TILE // 8, 8)), axis=1))
    best, eight = tl.max(highest, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = eight * 8 + tl.arange(0, 8)
    value = finite(tl.load(logits + place, mask=place < count, other=float("-inf")))
    return best, tl.min(tl.where(value == best, place, TILE), axis=0)


@kernel
def best_tile_kernel(tile_max, tile_arg, out, tiles, TILES: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    """The argmax of each row from its tiles'."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    _, token = row_peak(tile_max, tile_arg, row, tiles, TILES)
    tl.store(out + row, token)


@triton.jit
def row_peak(tile_max, tile_arg, row, tiles, TILES: tl.constexpr):
    """(highest logit, lowest id that has it) of a row."""
    tile = tl.arange(0, TILES)
    best = tl.load(tile_max + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    arg = tl.load(tile_arg + row * tiles + tile, mask=tile < tiles, other=0x7FFFFFFF)
    peak = tl.max(best, axis=0)
    return peak, tl.min(tl.where(best == peak, arg, 0x7FFFFFFF), axis=0)


@kernel
def tile_mass_kernel(
    logits,
    row_slots,
    positions,
    fields,
    bias_ids,
    bias_values,
    bias_until,
    counts,
    bitmask,
    tile_max,
    tile_mass,
    vocab,
    tiles,
    MAX_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ADJUST: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    tile = tl.program_id(1)
    slot = tl.load(row_slots + row)
    if slot >= 0:  # noqa: SIM102 (an `and` would read the parameters of a slot that is not there)
        if float_param(fields, slot, TEMPERATURE) > 0.0:
            each = tl.arange(0, TILES)
            best = tl.load(tile_max + row * tiles + each, mask=each < tiles, other=float("-inf"))
            peak = tl.max(best, axis=0)
            if peak > float("-inf"):
                value = adjusted_logits(
                    logits, row, slot, tile * TILE, vocab, tl.load(positions + row), fields, bias_ids, bias_values,
                    bias_until, counts, bitmask, MAX_BIAS, TILE, ADJUST,
                )  # fmt: skip
                factor, least = weight_scale(fields, slot)
                tl.store(tile_mass + row * tiles + tile, tl.sum(integer_weights(value, peak, factor, least), axis=0))


@kernel
def choose_kernel(
    logits,
    row_slots,
    positions,
    fields,
    bias_ids,
    bias_values,
    bias_until,
    counts,
    bitmask,
    tile_max,
    tile_arg,
    tile_mass,
    candidate_values,
    candidate_ids,
    out,
    vocab,
    tiles,
    MAX_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ADJUST: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slots + row)
    if slot < 0:
        tl.store(out + row, -1)
    else:
        position = tl.load(positions + row)
        peak, token = row_peak(tile_max, tile_arg, row, tiles, TILES)
        if (float_param(fields, slot, TEMPERATURE) > 0.0) & (peak > float("-inf")):
            factor, least = weight_scale(fields, slot)
            each = tl.arange(0, TILES)
            masses = tl.load(tile_mass + row * tiles + each, mask=each < tiles, other=0)
            total = tl.sum(masses, axis=0)
            top_k = int_param(fields, slot, TOP_K)
            top_p = float_param(fields, slot, TOP_P)
            filter_k = (top_k > 0) & (top_k < vocab)
            bound = float("-inf")
            kept = vocab
            gathered = 0
            if filter_k | (top_p < 1.0):
                bests = tl.load(tile_max + row * tiles + each, mask=each < tiles, other=float("inf"))
                step = peak - tl.maximum(tl.min(bests, axis=0), peak - 1.0e30) + 1.0
                # Round 0 searches by count for top-k, round 1 by mass for top-p, from where round 0 ended.
                for by_mass in range(2):
                    target = top_k.to(tl.int64)
                    wanted = filter_k
                    if by_mass == 1:
                        target = tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
                        wanted = top_p < 1.0
                    if wanted:
                        upper = peak
                        while bound < upper:
                            middle = 0.5 * bound + 0.5 * upper
                            if bound == float("-inf"):
                                middle = upper - step
                                step = step * 4.0
                            if middle <= bound:
                                middle = upper
                            number, mass, above, below = _measure(
                                logits, row, slot, vocab, position, fields, bias_ids, bias_values, bias_until, counts,
                                bitmask, tile_max, candidate_values, tiles, middle, peak, factor, least, gathered, kept,
                                MAX_BIAS, TILE, CANDIDATES, ADJUST,
                            )  # fmt: skip
                            reached = number.to(tl.int64)
                            if by_mass == 1:
                                reached = mass
                            if reached >= target:
                                bound = above
                                kept_now = number
                                total = mass
                                if gathered == 0:
                                    kept = kept_now
                                    if kept <= CANDIDATES:
                                        _gather(
                                            logits, row, slot, vocab, position, fields, bias_ids, bias_values,
                                            bias_until, counts, bitmask, tile_max, candidate_values, candidate_ids,
                                            tiles, bound, MAX_BIAS, TILE, CANDIDATES, ADJUST,
                                        )  # fmt: skip
                                        gathered = 1
                            else:
                                upper = below
            point = draw_point(fields, slot, position, total)
            token = _invert(
                logits, row, slot, vocab, position, fields, bias_ids, bias_values, bias_until, counts, bitmask,
                tile_max, tile_mass, candidate_values, candidate_ids, tiles, bound, peak, factor, least, gathered, kept,
                point, MAX_BIAS, TILE, CANDIDATES, ADJUST,
            )  # fmt: skip
        tl.store(out + row, token)
        if ADJUST:  # noqa: SIM102 (a constant and a runtime condition do not mix in one `and`)
            if int_param(fields, slot, PENALIZED) != 0:
                place = counts + slot.to(tl.int64) * vocab + token
                word = tl.load(place).to(tl.int32)
                tl.store(place, (word + ((word & 0x7FFF) < 0x7FFF).to(tl.int32)).to(tl.int16))


@triton.jit
def _measure(
    logits, row, slot, vocab, position, fields, bias_ids, bias_values, bias_until, counts, bitmask, tile_max,
    candidate_values, tiles, middle, peak, factor, least, gathered, kept,
    MAX_BIAS: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, ADJUST: tl.constexpr,
):  # fmt: skip
    """(number, mass, least value) of the logits ≥ `middle`, and the highest value below it."""
    if gathered == 1:
        index = tl.arange(0, CANDIDATES)
        value = tl.load(candidate_values + row * CANDIDATES + index, mask=index < kept, other=float("-inf"))
        number, mass, above, below = _tally(value, middle, peak, factor, least)
    else:
        number = 0
        mass = tl.full((), 0, tl.int64)
        above = float("inf")
        below = float("-inf")
        for tile in range(tiles):
            best = tl.load(tile_max + row * tiles + tile)
            if best < middle:
                below = tl.maximum(below, best)
            else:
                value = adjusted_logits(
                    logits, row, slot, tile * TILE, vocab, position, fields, bias_ids, bias_values, bias_until, counts,
                    bitmask, MAX_BIAS, TILE, ADJUST,
                )  # fmt: skip
                some, weight, low, high = _tally(value, middle, peak, factor, least)
                number += some
                mass += weight
                above = tl.minimum(above, low)
                below = tl.maximum(below, high)
    return number, mass, above, below


@triton.jit
def _tally(value, middle, peak, factor, least):
    over = value >= middle
    number = tl.sum(over.to(tl.int32), axis=0)
    mass = tl.sum(tl.where(over, integer_weights(value, peak, factor, least), 0), axis=0)
    above = tl.min(tl.where(over, value, float("inf")), axis=0)
    below = tl.max(tl.where(over, float("-inf"), value), axis=0)
    return number, mass, above, below


@triton.jit
def _gather(
    logits, row, slot, vocab, position, fields, bias_ids, bias_values, bias_until, counts, bitmask, tile_max,
    candidate_values, candidate_ids, tiles, bound,
    MAX_BIAS: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, ADJUST: tl.constexpr,
):  # fmt: skip
    """Copy the logits ≥ `bound` and their ids to the row's candidates, in order of ids."""
    at = 0
    for tile in range(tiles):
        if tl.load(tile_max + row * tiles + tile) >= bound:
            value = adjusted_logits(
                logits, row, slot, tile * TILE, vocab, position, fields, bias_ids, bias_values, bias_until, counts,
                bitmask, MAX_BIAS, TILE, ADJUST,
            )  # fmt: skip
            over = value >= bound
            place = row * CANDIDATES + at + tl.cumsum(over.to(tl.int32), axis=0) - 1
            tl.store(candidate_values + place, value, mask=over)
            tl.store(candidate_ids + place, tile * TILE + tl.arange(0, TILE), mask=over)
            at += tl.sum(over.to(tl.int32), axis=0)
    # The rows of threads that read the candidates next are not those that wrote them.
    tl.debug_barrier()


@triton.jit
def _invert(
    logits, row, slot, vocab, position, fields, bias_ids, bias_values, bias_until, counts, bitmask, tile_max, tile_mass,
    candidate_values, candidate_ids, tiles, bound, peak, factor, least, gathered, kept, point,
    MAX_BIAS: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, ADJUST: tl.constexpr,
):  # fmt: skip
    """The first token, by id, at which the cumulated weight of the tokens ≥ `bound` exceeds `point`."""
    if gathered == 1:
        index = tl.arange(0, CANDIDATES)
        value = tl.load(candidate_values + row * CANDIDATES + index, mask=index < kept, other=float("-inf"))
        weight = tl.where(value >= bound, integer_weights(value, peak, factor, least), 0)
        place = tl.sum((tl.cumsum(weight, axis=0) <= point).to(tl.int32), axis=0)
        token = tl.load(candidate_ids + row * CANDIDATES + place)
    else:
        tile = 0
        before = tl.full((), 0, tl.int64)
        passed = True
        for each in range(tiles):
            if passed & (tl.load(tile_max + row * tiles + each) >= bound):
                if bound == float("-inf"):
                    mass = tl.load(tile_mass + row * tiles + each)
                else:
                    value = adjusted_logits(
                        logits, row, slot, each * TILE, vocab, position, fields, bias_ids, bias_values, bias_until,
                        counts, bitmask, MAX_BIAS, TILE, ADJUST,
                    )  # fmt: skip
                    mass = tl.sum(tl.where(value >= bound, integer_weights(value, peak, factor, least), 0), axis=0)
                if before + mass > point:
                    tile = each
                    passed = False
                else:
                    before += mass
        value = adjusted_logits(
            logits, row, slot, tile * TILE, vocab, position, fields, bias_ids, bias_values, bias_until, counts, bitmask,
            MAX_BIAS, TILE, ADJUST,
        )  # fmt: skip
        weight = tl.where(value >= bound, integer_weights(value, peak, factor, least), 0)
        place = tl.sum((before + tl.cumsum(weight, axis=0) <= point).to(tl.int32), axis=0)
        token = tile * TILE + place
    return token
