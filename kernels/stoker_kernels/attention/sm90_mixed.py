"""Attention of mixed steps for SM 9.0 in one launch: host side of csrc/sm90_mixed.

Invariants: a launch's size depends on host integers alone, and nothing is allocated. The plans of a step's shares and
tiles, and this launch, use the same bounds.
Knows nothing of what takes over where `refusal` says no.
"""

from __future__ import annotations

import ctypes

import triton

from stoker_kernels.attention.config import mixed_stream_config, shares_first
from stoker_kernels.attention.inputs import Inputs
from stoker_kernels.attention.meta import MAX_TILES, AttentionMeta
from stoker_kernels.attention.sm90_decode import (
    ARCH,
    THREADS,
    DecodeArguments,
    cache_refusal,
    decode_arguments,
    decode_maps,
    num_ctas,
    shared_bytes,
)
from stoker_kernels.attention.tile_plan import PLANNED_TILES, ROWS, tile_plan_kernel
from stoker_kernels.launch import cuda
from stoker_kernels.launch.dispatch import sm_count
from stoker_kernels.launch.pdl import launch_options, pdl_on

STEM = "sm90_mixed"
TILE_ROWS = 64
WIDE_UNIT_BYTES = 32768  # a unit of e4m3 in f16


class MixedArguments(ctypes.Structure):
    """MixedArguments of csrc/sm90_mixed.cuh."""

    _fields_ = [
        ("decode", DecodeArguments),
        ("tiles", ctypes.c_void_p),
        ("num_tiles", ctypes.c_void_p),
        ("decode_ctas", ctypes.c_int),
    ]


def refusal(inputs: Inputs, meta: AttentionMeta) -> str | None:
    """None where the kernel runs a step that `sm90_decode.available` holds of, else why not."""
    if inputs.scale <= 0.0 or inputs.softcap > 0.0:
        return "takes a positive scale and no soft-cap"
    if not has_room(meta, inputs.q.shape[0], inputs.group):
        return f"takes up to {MAX_TILES} tiles"
    return cuda.missing_cubin(STEM, ARCH) or cache_refusal(inputs)


def tile_bound(meta: AttentionMeta, num_tokens: int, group: int) -> int:
    """Tiles that serve any split of the step's prefill tokens into its chunks, and the padding."""
    chunks = meta.seq_lens.shape[0] - meta.num_decodes
    return (num_tokens - meta.num_decodes) // (TILE_ROWS // group) + chunks + 1


def has_room(meta: AttentionMeta, num_tokens: int, group: int) -> bool:
    """Whether the workspace holds the tiles of any such step."""
    return tile_bound(meta, num_tokens, group) <= MAX_TILES


def plan_tiles(meta: AttentionMeta, num_tokens: int, group: int) -> None:
    """Write the tiles of this step, of `num_tokens` tokens with its padding, into the workspace."""
    first = meta.num_decodes
    tile_plan_kernel[(triton.cdiv(tile_bound(meta, num_tokens, group), PLANNED_TILES),)](
        meta.query_start[first:],
        meta.seq_lens[first:],
        meta.seq_slots[first:],
        meta.workspace.tiles,
        meta.workspace.num_tiles,
        meta.seq_lens.shape[0] - first,
        num_tokens,
        TILE_ROWS // group,
        TILES=PLANNED_TILES,
        BLOCK_ROWS=ROWS,
        num_warps=4,
        **launch_options(meta.seq_lens.device),
    )


def launch_mixed(inputs: Inputs, meta: AttentionMeta, plan_window: int, *, settled: bool) -> None:
    """Run the planned shares, planned with `mixed_stream_config` and `plan_window`, and the planned tiles.

    `settled`: `meta.settled` holds of the plan of the shares too.
    """
    kv_heads, device = inputs.k_cache.shape[1], inputs.q.device
    kv_bytes = 1 if inputs.fp8 else 2
    config = mixed_stream_config(kv_bytes)
    shares = num_ctas(meta, kv_heads, config) if meta.num_decodes > 0 else 0
    tiles = tile_bound(meta, inputs.q.shape[0], inputs.group) * kv_heads
    grid = min(config.ctas_per_sm * sm_count(device), shares + tiles)
    arguments = MixedArguments(
        decode_arguments(inputs, meta, plan_window, config.stages, settled=settled),
        meta.workspace.tiles.data_ptr(),
        meta.workspace.num_tiles.data_ptr(),
        min(shares_first(kv_bytes, grid, tiles), shares),
    )
    if shares == 0:
        arguments.decode.num_shares = 0
    name = f"sm90_{'e4m3' if inputs.fp8 else 'bf16'}_mixed"
    shared = shared_bytes(kv_bytes, config.stages, inputs.group) + (WIDE_UNIT_BYTES if inputs.fp8 else 0)
    chosen = cuda.kernel(STEM, ARCH, name, shared, THREADS, device.index or 0)
    cuda.launch(chosen, grid, [*decode_maps(inputs), arguments], device, pdl=pdl_on(device))
