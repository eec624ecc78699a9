"""The kernel of the typical set: a program a row, which reads the row's logits once for each bit of the distance.

Invariants: integers as in `reference_typical.py`; a program writes the words of its own row alone.
Knows nothing of dispatch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import itertools

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.sampling.state import MAX_BIAS, SURPRISE_UNITS, TILE, WEIGHT_SHIFT, Param, SamplingState
from stoker_kernels.sampling.triton_device import (
    ADJUSTMENT_TYPES,
    EXACT,
    TEMPERATURE,
    adjusted_logits,
    float_param,
    integer_weights,
    weight_scale,
)

_WARPS = 8
_TYPICAL_P = tl.constexpr(int(Param.TYPICAL_P))
_UNITS = tl.constexpr(float(SURPRISE_UNITS))
_SHIFT = tl.constexpr(WEIGHT_SHIFT)
# Surprise ends 100 bits beyond the peak.
_DISTANCE_BITS = tl.constexpr((100 * SURPRISE_UNITS).bit_length())
_HIGHEST = tl.constexpr(1 << (100 * SURPRISE_UNITS).bit_length() - 1)


@kernel
def typical_kernel(
    logits,
    row_slots,
    positions,
    fields,
    bias_ids,
    bias_values,
    bias_until,
    counts,
    bitmask,
    vocab,
    tiles,
    MAX_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slots + row)
    if slot >= 0:
        typical_p = float_param(fields, slot, _TYPICAL_P)
        if (typical_p < 1.0) & (float_param(fields, slot, TEMPERATURE) > 0.0):
            position = tl.load(positions + row)
            peak = float("-inf")
            for tile in range(tiles):
                value = adjusted_logits(
                    logits, row, slot, tile * TILE, vocab, position, fields, bias_ids, bias_values, bias_until, counts,
                    bitmask, MAX_BIAS, TILE, True,
                )  # fmt: skip
                peak = tl.maximum(peak, tl.max(value, axis=0))
            if peak > float("-inf"):
                factor, _ = weight_scale(fields, slot)
                total = tl.full((), 0, tl.int64)
                coarse = tl.full((), 0, tl.int64)
                moment = tl.full((), 0, tl.int64)
                for tile in range(tiles):
                    value = adjusted_logits(
                        logits, row, slot, tile * TILE, vocab, position, fields, bias_ids, bias_values, bias_until,
                        counts, bitmask, MAX_BIAS, TILE, True,
                    )  # fmt: skip
                    weight = integer_weights(value, peak, factor, 1)
                    total += tl.sum(weight, axis=0)
                    coarse += tl.sum(weight >> _SHIFT, axis=0)
                    moment += tl.sum((weight >> _SHIFT) * _surprise(value, peak, factor), axis=0)
                # Triton's analysis divides by the sum's first value, 0, unless it is kept from that.
                mean = moment // tl.maximum(coarse, 1)
                target = tl.maximum((typical_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
                # The largest distance that falls short of the target, bit by bit; one more is enough.
                short = tl.full((), -1, tl.int64)
                for bit in range(_DISTANCE_BITS):
                    trial = short + (_HIGHEST >> bit)
                    mass = tl.full((), 0, tl.int64)
                    for tile in range(tiles):
                        value = adjusted_logits(
                            logits, row, slot, tile * TILE, vocab, position, fields, bias_ids, bias_values, bias_until,
                            counts, bitmask, MAX_BIAS, TILE, True,
                        )  # fmt: skip
                        near = tl.abs(_surprise(value, peak, factor) - mean) <= trial
                        mass += tl.sum(tl.where(near, integer_weights(value, peak, factor, 1), 0), axis=0)
                    short = tl.where(mass < target, trial, short)
                words = (vocab + 31) // 32
                for tile in range(tiles):
                    value = adjusted_logits(
                        logits, row, slot, tile * TILE, vocab, position, fields, bias_ids, bias_values, bias_until,
                        counts, bitmask, MAX_BIAS, TILE, True,
                    )  # fmt: skip
                    near = tl.abs(_surprise(value, peak, factor) - mean) <= short + 1
                    kept = near & (integer_weights(value, peak, factor, 1) > 0)
                    bits = tl.reshape(kept.to(tl.int32), (TILE // 32, 32)) << tl.arange(0, 32)[None, :]
                    index = tile * (TILE // 32) + tl.arange(0, TILE // 32)
                    tl.store(bitmask + row.to(tl.int64) * words + index, tl.sum(bits, axis=1), mask=index < words)


@triton.jit
def _surprise(value, peak, factor):
    """int64 parts of a bit by which a token is less likely than the best."""
    return (tl.maximum((value - peak) * factor, -100.0) * -_UNITS).to(tl.int64)


def typical_mask(logits: Tensor, state: SamplingState, row_slots: Tensor, positions: Tensor, bitmask: Tensor) -> None:
    """`typical.typical_mask` on CUDA."""
    rows, vocab = logits.shape
    if not logits.is_contiguous() or vocab != state.vocab:
        raise ValueError(f"the typical set takes contiguous logits of {state.vocab} tokens")
    if rows == 0:
        return
    typical_kernel[(rows,)](
        logits,
        row_slots,
        positions,
        *state.adjustments,
        bitmask,
        vocab,
        triton.cdiv(vocab, TILE),
        MAX_BIAS=MAX_BIAS,
        TILE=TILE,
        num_warps=_WARPS,
        **EXACT,
        **launch_options(logits.device),
    )


def _register() -> None:
    for dtype, vocab in itertools.product((BF16, FP16, FP32), (I32_DIVISIBLE, I32)):
        signature = {
            "logits": f"*{dtype}",
            **ADJUSTMENT_TYPES,
            "bitmask": f"*{I32}",
            "vocab": vocab,
            "tiles": I32,
        }
        constants = {"MAX_BIAS": MAX_BIAS, "TILE": TILE}
        register_aot(
            typical_kernel, signature, [constants], options=EXACT | {"num_warps": _WARPS}, compact=dtype == BF16
        )


_register()
