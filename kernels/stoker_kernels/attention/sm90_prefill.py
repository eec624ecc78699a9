"""Prefill attention for SM 9.0 in CUDA: host side of csrc/sm90_prefill.

Invariants: a launch's size depends on host integers alone, and nothing is allocated.
Knows nothing of what takes over where `refusal` says no.
"""

from __future__ import annotations

import ctypes

import torch

from stoker_kernels.attention.inputs import Inputs
from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.attention.sm90_decode import HEAD_DIM, LOG2E, UNIT, cache_map, cache_refusal
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import pdl_on

STEM, ARCH, NAME = "sm90_prefill", "sm_90a", "sm90_bf16_prefill"
TILE_ROWS = 128
THREADS = 384
RING = 2
SHARED_BYTES = 1024 + 3 * RING * TILE_ROWS * HEAD_DIM * 2 + RING * 32 + 6 * RING * 8

_POINTERS = ("out", "page_table", "seq_slots", "query_start", "seq_lens", "tickets")
_NUMBERS = (
    *("rows", "tokens", "first_token", "tiles", "kv_heads", "group", "out_stride", "table_stride", "page_shift"),
    *("page_rows", "head_rows", "box_rows"),
)


class PrefillArguments(ctypes.Structure):
    """PrefillArguments of csrc/sm90_prefill.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_int) for name in _NUMBERS),
    ]


def refusal(inputs: Inputs) -> str | None:
    """None where the kernel runs these inputs, else why not."""
    device = inputs.q.device
    if device.type != "cuda" or not chip_of(sm_of(device)).wgmma:
        return "made for SM 9.0"
    if inputs.q.shape[2] != HEAD_DIM or inputs.group > TILE_ROWS or inputs.kv_dtype is not torch.bfloat16:
        return f"takes heads of {HEAD_DIM} and a bf16 cache"
    if inputs.window > 0 or inputs.softcap > 0.0 or inputs.sinks is not None or inputs.scale <= 0.0:
        return "takes no window, soft-cap or sinks, and a positive scale"
    return cuda.missing_cubin(STEM, ARCH) or cache_refusal(inputs)


def tile_count(tokens: int, rows: int, group: int) -> int:
    """Tiles that serve any split of `tokens` tokens into `rows` chunks, and the padding."""
    return tokens // (TILE_ROWS // group) + rows + 1


def launch_tiles(inputs: Inputs, meta: AttentionMeta) -> None:
    """Run the rows from `num_decodes` on, and zero the tokens past the last row."""
    q, k, v = inputs.q, inputs.k_cache, inputs.v_cache
    pages, kv_heads, page = k.shape[:3]
    first, tokens = meta.num_decodes, q.shape[0]
    rows = meta.seq_lens.shape[0] - first
    tiles = tile_count(tokens - first, rows, inputs.group)
    page_rows, head_rows = k.stride(0) // HEAD_DIM, k.stride(1) // HEAD_DIM
    box_rows = min(UNIT, page)
    arguments = PrefillArguments(
        inputs.out.data_ptr(), meta.page_table.data_ptr(), meta.seq_slots[first:].data_ptr(),
        meta.query_start[first:].data_ptr(), meta.seq_lens[first:].data_ptr(), meta.workspace.tickets.data_ptr(),
        inputs.scale * LOG2E,
        rows, tokens, first, tiles, kv_heads, inputs.group, inputs.out.stride(0), meta.page_table.stride(0),
        page.bit_length() - 1, page_rows, head_rows, box_rows,
    )  # fmt: skip
    cache_rows = (pages - 1) * page_rows + (kv_heads - 1) * head_rows + page
    maps = [cache_map(t.data_ptr(), cache_rows, 2, box_rows) for t in (k, v)]
    q_map = cuda.tensor_map_3d(q, (TILE_ROWS // inputs.group, inputs.group))
    chosen = cuda.kernel(STEM, ARCH, NAME, SHARED_BYTES, THREADS, q.device.index or 0)
    grid = min(sm_count(q.device), tiles * kv_heads)
    cuda.launch(chosen, grid, [q_map, *maps, arguments], q.device, pdl=pdl_on(q.device))
