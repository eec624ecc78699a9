"""Launches the sampling kernels.

Invariants: grids depend on the number of rows and the vocabulary alone; scratch memory is the state's, so that a
captured graph allocates nothing but its result.
Knows nothing of dispatch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, I64, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.sampling.state import (
    CANDIDATES,
    MAX_BIAS,
    NUM_BIAS_WORDS,
    NUM_HISTORY_WORDS,
    PARAMS,
    TILE,
    Param,
    SamplingState,
    padded_tiles,
    tiles_ahead,
)
from stoker_kernels.sampling.triton_device import ADJUSTMENT_TYPES, EXACT
from stoker_kernels.sampling.triton_kernels import best_tile_kernel, choose_kernel, tile_mass_kernel, tile_max_kernel
from stoker_kernels.sampling.triton_logprobs import token_logprobs

__all__ = ["apply", "argmax", "sample", "tile_peaks", "token_logprobs"]

_COUNTS_BLOCK = 8192
_ENTRIES_BLOCK = 512
_CHOOSE_WARPS = 8


def argmax(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`sampling.argmax` on CUDA."""
    rows, _ = _shape(logits)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    if rows == 0:
        return out
    tile_max, tile_arg = tile_peaks(logits)
    tiles = tile_max.shape[1]
    options = launch_options(logits.device)
    best_tile_kernel[(rows,)](tile_max, tile_arg, out, tiles, TILES=padded_tiles(tiles), num_warps=1, **options)
    return out


def tile_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`logits [R,V]` of at least one row → of each of their tiles the highest logit, fp32, and its id, int32."""
    rows, vocab = _shape(logits)
    tiles = triton.cdiv(vocab, TILE)
    tile_max = torch.empty((rows, tiles), dtype=torch.float32, device=logits.device)
    tile_arg = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    tile_max_kernel[(rows, tiles)](
        logits,
        *[None] * 8,
        tile_max,
        tile_arg,
        vocab,
        tiles,
        MAX_BIAS=MAX_BIAS,
        TILE=TILE,
        ADJUST=False,
        **EXACT,
        **launch_options(logits.device),
    )
    return tile_max, tile_arg


def sample(
    logits: Tensor,
    state: SamplingState,
    row_slots: Tensor,
    positions: Tensor,
    *,
    adjust: bool = True,
    bitmask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`sampling.sample` on CUDA."""
    check_shape(logits, state)
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    if rows == 0:
        return out
    common = (
        logits,
        row_slots,
        positions,
        *state.adjustments,
        bitmask,
    )
    constants: dict[str, Any] = {"MAX_BIAS": MAX_BIAS, "TILE": TILE, "ADJUST": adjust}
    constants |= EXACT | launch_options(logits.device)
    padded = padded_tiles(tiles)
    tile_max_kernel[(rows, tiles)](*common, state.tile_max, state.tile_arg, vocab, tiles, **constants)
    tile_mass_kernel[(rows, tiles)](*common, state.tile_max, state.tile_mass, vocab, tiles, TILES=padded, **constants)
    choose_kernel[(rows,)](
        *common,
        state.tile_max,
        state.tile_arg,
        state.tile_mass,
        state.candidate_values,
        state.candidate_ids,
        out,
        vocab,
        tiles,
        TILES=padded,
        CANDIDATES=CANDIDATES,
        num_warps=_CHOOSE_WARPS,
        **constants,
    )
    return out


@kernel
def _apply_kernel(
    packed,
    fields,
    bias_ids,
    bias_values,
    bias_until,
    counts,
    vocab,
    PARAMS: tl.constexpr,
    PENALIZED: tl.constexpr,
    BIAS_COUNT: tl.constexpr,
    BIAS_START: tl.constexpr,
    HISTORY_COUNT: tl.constexpr,
    HISTORY_START: tl.constexpr,
    MAX_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """A program per slot and block of counts; the first block's also writes parameters and bias."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    header = packed + tl.program_id(0) * PARAMS
    slot = tl.load(header)
    block = tl.program_id(1)
    if block == 0:
        column = tl.arange(0, PARAMS)
        tl.store(fields + slot * PARAMS + column, tl.load(header + column))
        entry = tl.arange(0, MAX_BIAS)
        mine = entry < tl.load(header + BIAS_COUNT)
        source = packed + tl.load(header + BIAS_START) + 3 * entry
        target = slot * MAX_BIAS + entry
        tl.store(bias_ids + target, tl.load(source, mask=mine, other=0), mask=mine)
        value = tl.load(source + 1, mask=mine, other=0).to(tl.float32, bitcast=True)
        tl.store(bias_values + target, value, mask=mine)
        tl.store(bias_until + target, tl.load(source + 2, mask=mine, other=0), mask=mine)
    if tl.load(header + PENALIZED) != 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        line = counts + slot.to(tl.int64) * vocab
        tl.store(line + token, tl.zeros([BLOCK], tl.int16), mask=token < vocab)
        # The zeros are down before any count goes on top of them.
        tl.debug_barrier()
        number = tl.load(header + HISTORY_COUNT)
        history = packed + tl.load(header + HISTORY_START)
        for start in range(0, number, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            seen = tl.load(history + 2 * entry, mask=entry < number, other=-1)
            here = (seen >= block * BLOCK) & (seen < (block + 1) * BLOCK)
            word = tl.load(history + 2 * entry + 1, mask=here, other=0)
            tl.store(line + seen, word.to(tl.int16), mask=here)


def apply(packed: Tensor, updates: int, state: SamplingState) -> None:
    """`sampling_state.apply_slot_sampling` on CUDA."""
    _apply_kernel[(updates, triton.cdiv(state.vocab, _COUNTS_BLOCK))](
        packed,
        *state.adjustments,
        state.vocab,
        **_apply_constants(),
        **launch_options(packed.device),
    )


def _apply_constants() -> dict[str, int]:
    assert (NUM_BIAS_WORDS, NUM_HISTORY_WORDS) == (3, 2), "the kernel strides by these"
    return {
        "PARAMS": PARAMS,
        "PENALIZED": int(Param.PENALIZED),
        "BIAS_COUNT": int(Param.BIAS_COUNT),
        "BIAS_START": int(Param.BIAS_START),
        "HISTORY_COUNT": int(Param.HISTORY_COUNT),
        "HISTORY_START": int(Param.HISTORY_START),
        "MAX_BIAS": MAX_BIAS,
        "BLOCK": _COUNTS_BLOCK,
        "ENTRIES": _ENTRIES_BLOCK,
    }


def check_shape(logits: Tensor, state: SamplingState) -> None:
    """Raise ValueError for logits that are not contiguous, or not of the state's vocabulary."""
    _, vocab = _shape(logits)
    if vocab != state.vocab:
        raise ValueError(f"logits of {vocab} tokens do not fit a state of {state.vocab}")


def _shape(logits: Tensor) -> tuple[int, int]:
    if not logits.is_contiguous():
        raise ValueError("sampling takes contiguous logits")
    rows, vocab = logits.shape
    return rows, vocab


def _register() -> None:
    maxima = {"tile_max": f"*{FP32}", "tile_arg": f"*{I32}"}
    masses = {"tile_mass": f"*{I64}"}
    candidates = {"candidate_values": f"*{FP32}", "candidate_ids": f"*{I32}", "out": f"*{I32}"}
    for dtype, vocab in itertools.product((BF16, FP16, FP32), (I32_DIVISIBLE, I32)):
        compact = dtype == BF16 and vocab == I32_DIVISIBLE
        # Rows of a vocabulary that is no multiple of 16 start anywhere.
        sizes = {"logits": f"*{dtype}", "vocab": vocab, "tiles": I32}
        constants: dict[str, object] = {"MAX_BIAS": MAX_BIAS, "TILE": TILE}
        greedy = constants | dict.fromkeys([*ADJUSTMENT_TYPES, "bitmask"]) | {"ADJUST": False}
        register_aot(tile_max_kernel, sizes | maxima, [greedy], options=EXACT, compact=compact)
        for adjust, masked in ((False, False), (True, False), (True, True)):
            inputs = sizes | ADJUSTMENT_TYPES | ({"bitmask": f"*{I32}"} if masked else {})
            fixed = constants | {"ADJUST": adjust} | ({} if masked else {"bitmask": None})
            register_aot(tile_max_kernel, inputs | maxima, [fixed], options=EXACT, compact=compact and masked)
            register_aot(
                tile_mass_kernel,
                inputs | {"tile_max": maxima["tile_max"]} | masses,
                [fixed | {"TILES": tiles} for tiles in tiles_ahead(wide=dtype == BF16)],
                options=EXACT,
                compact=compact and masked,
            )
            register_aot(
                choose_kernel,
                inputs | maxima | masses | candidates,
                [fixed | {"TILES": each, "CANDIDATES": CANDIDATES} for each in tiles_ahead(wide=dtype == BF16)],
                options=EXACT | {"num_warps": _CHOOSE_WARPS},
                compact=compact and masked,
            )
    register_aot(
        best_tile_kernel,
        maxima | {"out": f"*{I32}", "tiles": I32},
        [{"TILES": tiles} for tiles in tiles_ahead(wide=True)],
        options={"num_warps": 1},
    )
    applied = {name: kind for name, kind in ADJUSTMENT_TYPES.items() if name not in ("row_slots", "positions")}
    for vocab in (I32_DIVISIBLE, I32):
        register_aot(_apply_kernel, applied | {"packed": f"*{I32}", "vocab": vocab}, [_apply_constants()])


_register()
