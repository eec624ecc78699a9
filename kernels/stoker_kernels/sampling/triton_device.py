"""Device functions of sampling: logits as they count for a row, integer weights, the random point.

Invariants: each floating-point step is one exactly rounded operation in the order of `reference.py`;
kernels that call these are launched with `enable_fp_fusion=False`, since a fused multiply-add would round otherwise.
Knows nothing of grids.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.launch.aot_registry import FP32, I32, I32_ANYWHERE
from stoker_kernels.sampling.state import PARAMS, Param

PARAM_STRIDE = tl.constexpr(PARAMS)
TEMPERATURE = tl.constexpr(int(Param.TEMPERATURE))
TOP_K = tl.constexpr(int(Param.TOP_K))
TOP_P = tl.constexpr(int(Param.TOP_P))
MIN_P = tl.constexpr(int(Param.MIN_P))
REPETITION = tl.constexpr(int(Param.REPETITION))
FREQUENCY = tl.constexpr(int(Param.FREQUENCY))
PRESENCE = tl.constexpr(int(Param.PRESENCE))
SEED_LOW = tl.constexpr(int(Param.SEED_LOW))
SEED_HIGH = tl.constexpr(int(Param.SEED_HIGH))
PENALIZED = tl.constexpr(int(Param.PENALIZED))
BIAS_COUNT = tl.constexpr(int(Param.BIAS_COUNT))

# Launch options: the kernels repeat the reference's roundings, which a fused multiply-add would change.
EXACT = {"enable_fp_fusion": False}
# Types, for the registry, of what kernels that call `adjusted_logits` take before the bitmask.
ADJUSTMENT_TYPES = {
    "row_slots": I32_ANYWHERE,
    "positions": I32_ANYWHERE,
    "fields": f"*{I32}",
    "bias_ids": f"*{I32}",
    "bias_values": f"*{FP32}",
    "bias_until": f"*{I32}",
    "counts": "*i16",
}


@triton.jit
def finite(value):
    """fp32 with NaN as −inf and +inf as 3e38, which no comparison or difference below could carry."""
    value = value.to(tl.float32)
    return tl.where(value == value, tl.minimum(value, 3.0e38), float("-inf"))


@triton.jit
def adjusted_logits(
    logits,
    row,
    slot,
    start,
    vocab,
    position,
    params,
    bias_ids,
    bias_values,
    bias_until,
    counts,
    bitmask,
    MAX_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    ADJUST: tl.constexpr,
):
    """fp32 logits `[start, start + TILE)` of a row after bitmask, bias and penalties; −inf past the vocabulary."""
    token = start + tl.arange(0, TILE)
    inside = token < vocab
    value = finite(tl.load(logits + row.to(tl.int64) * vocab + token, mask=inside, other=float("-inf")))
    if ADJUST:
        if bitmask is not None:
            words = (vocab + 31) // 32
            word = tl.load(bitmask + row.to(tl.int64) * words + token // 32, mask=inside, other=0)
            value = tl.where((word >> (token % 32)) & 1 == 1, value, float("-inf"))
        bias_count = int_param(params, slot, BIAS_COUNT)
        if bias_count > 0:
            value = _biased(
                value, token, start, slot, position, bias_count, bias_ids, bias_values, bias_until, MAX_BIAS, TILE
            )
        if int_param(params, slot, PENALIZED) != 0:
            value = _penalized(value, token, inside, slot, vocab, params, counts)
    return value


@triton.jit
def _biased(
    value,
    token,
    start,
    slot,
    position,
    bias_count,
    bias_ids,
    bias_values,
    bias_until,
    MAX_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the entries that lie in this tile, one after the other: ids ascend, and one may occur twice."""
    entry = tl.arange(0, MAX_BIAS)
    ids = tl.load(bias_ids + slot * MAX_BIAS + entry, mask=entry < bias_count, other=0x7FFFFFFF)
    first = tl.sum((ids < start).to(tl.int32))
    last = tl.sum((ids < start + TILE).to(tl.int32))
    for i in range(first, last):
        place = slot * MAX_BIAS + i
        if tl.load(bias_until + place) > position:
            value = tl.where(token == tl.load(bias_ids + place), value + tl.load(bias_values + place), value)
    return value


@triton.jit
def _penalized(value, token, inside, slot, vocab, params, counts):
    repetition = float_param(params, slot, REPETITION)
    frequency = float_param(params, slot, FREQUENCY)
    presence = float_param(params, slot, PRESENCE)
    word = tl.load(counts + slot.to(tl.int64) * vocab + token, mask=inside, other=0).to(tl.int32)
    outputs = word & 0x7FFF
    repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where(word != 0, repeated, value)
    value = value - outputs.to(tl.float32) * frequency
    return value - (outputs > 0).to(tl.float32) * presence


@triton.jit
def float_param(params, slot, COLUMN: tl.constexpr):
    """A float of the slot's parameters, which are stored by their bits."""
    return int_param(params, slot, COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def int_param(params, slot, COLUMN: tl.constexpr):
    """One of the slot's parameters."""
    return tl.load(params + slot * PARAM_STRIDE + COLUMN)


@triton.jit
def weight_scale(params, slot):
    """(factor of exponents to base 2, least weight that min-p keeps) of a slot."""
    factor = tl.div_rn(1.0, float_param(params, slot, TEMPERATURE)) * 1.4426950408889634
    least = (float_param(params, slot, MIN_P).to(tl.float64) * 1099511627776.0).to(tl.int64)
    return factor, tl.maximum(least, 1)


@triton.jit
def integer_weights(value, peak, factor, least):
    """int64 2⁴⁰ · 2^((value − peak) · factor), truncated; 0 where below `least`. See `reference_sampling._weights`."""
    exponent = tl.maximum((value - peak) * factor, -100.0)
    whole = tl.floor(exponent)
    part = exponent - whole
    mantissa = 0.0018671444850042462 * part + 0.00901699997484684
    mantissa = mantissa * part + 0.0557999350130558
    mantissa = mantissa * part + 0.24016444385051727
    mantissa = mantissa * part + 0.6931512951850891
    mantissa = mantissa * part + 1.0
    scale = ((whole.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)
    weight = (mantissa * scale).to(tl.int64)
    return tl.where(weight >= least, weight, 0)


@triton.jit
def draw_point(params, slot, position, total):
    """A point in [0, total): the high half of total times 64 bits of Philox 4x32-10 of (seed, position)."""
    low = int_param(params, slot, SEED_LOW).to(tl.uint32, bitcast=True)
    high = int_param(params, slot, SEED_HIGH).to(tl.uint32, bitcast=True)
    seed = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    zero = position * 0
    a, b, _, _ = tl.philox(seed, position, zero, zero, zero)
    bits = (b.to(tl.uint64) << 32) | a.to(tl.uint64)
    return tl.umulhi(bits, total.to(tl.uint64)).to(tl.int64)
