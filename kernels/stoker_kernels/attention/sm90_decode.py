"""Decode attention for SM 9.0 in CUDA: host side of csrc/sm90_decode.

Invariants: a launch's size depends on host integers alone; plan and launch of a step use the same `StreamConfig`;
nothing is allocated. Results are the same bit for bit from launch to launch.
Knows nothing of what takes over where `cache_refusal` says no.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch
import triton

from stoker_kernels.attention.config import StreamConfig
from stoker_kernels.attention.inputs import Inputs
from stoker_kernels.attention.meta import AttentionMeta
from stoker_kernels.attention.share_plan import share_plan_kernel
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import launch_options, pdl_on

STEM, ARCH = "sm90_decode", "sm_90a"
HEAD_DIM, MAX_GROUP = 128, 8
UNIT = 64  # keys
BOX_ROWS = 16  # keys a copy moves, at most: what a stream's last unit is rounded up to
CONSUMER_WARPS = 4
Q_PITCH = HEAD_DIM * 2 + 16
EXCHANGE_BYTES = 2 * CONSUMER_WARPS * (32 * 8 + MAX_GROUP * 4)
HEADER_BYTES = 32
THREADS = 32 * CONSUMER_WARPS + 32
LOG2E = math.log2(math.e)
DTYPES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}

_POINTERS = (
    *("out", "q", "page_table", "seq_lens", "seq_slots", "shares", "tickets", "partial", "partial_lse", "arrivals"),
    *("k_scale", "v_scale", "sinks", "before", "before_lse"),
)
_NUMBERS = (
    *("window", "plan_window", "rows", "kv_heads", "group", "q_stride", "out_stride", "table_stride", "page_shift"),
    *("page_rows", "head_rows", "box_rows", "stages", "num_shares", "settled", "parts", "fresh"),
)


class DecodeArguments(ctypes.Structure):
    """DecodeArguments of csrc/sm90_decode.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("scale_log2", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_int) for name in _NUMBERS),
    ]


def available(device: torch.device, kv_dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Whether steps of this model are planned for these kernels."""
    return model_refusal(device, kv_dtype, head_dim, group) is None


def model_refusal(device: torch.device, kv_dtype: torch.dtype, head_dim: int, group: int) -> str | None:
    """None where these kernels run a model, else why not."""
    if device.type != "cuda" or not chip_of(sm_of(device)).wgmma:
        return "made for SM 9.0"
    if head_dim != HEAD_DIM or group > MAX_GROUP:
        return f"takes heads of {HEAD_DIM}, up to {MAX_GROUP} a KV head"
    if kv_dtype not in DTYPES:
        return "takes a cache of bfloat16 or e4m3"
    return cuda.missing_cubin(STEM, ARCH)


def cache_refusal(inputs: Inputs) -> str | None:
    """None where tensor maps describe the cache, rows can be copied 16 bytes at a time, and every query sees all keys
    before it alike; else why not.
    """
    q, k = inputs.q, inputs.k_cache
    page_stride, head_stride, token_stride, _ = (stride * k.element_size() for stride in k.stride())
    row = HEAD_DIM * (1 if inputs.fp8 else 2)
    if q.dtype is not torch.bfloat16 or inputs.out.dtype is not torch.bfloat16:
        return f"queries are {q.dtype}, not bfloat16"
    if inputs.slopes is not None or inputs.pattern is not None:
        return "takes no slopes and no pattern of blocks"
    if token_stride != row or page_stride % row or head_stride % row:
        return "the cache's heads and pages are not whole rows of contiguous tokens"
    if any(t.data_ptr() % 16 or t.stride(0) % 8 for t in (q, inputs.out)) or k.data_ptr() % 16:
        return "rows do not start on multiples of 16 bytes"
    if inputs.v_cache.data_ptr() % 16:
        return "v_cache does not start on a multiple of 16 bytes"
    return None


def stage_bytes(kv_bytes: int) -> int:
    """Shared memory of a stage's keys and values."""
    return 2 * UNIT * HEAD_DIM * kv_bytes


def shared_bytes(kv_bytes: int, stages: int, group: int) -> int:
    """Dynamic shared memory of a CTA; see DecodeRing."""
    each = stage_bytes(kv_bytes) + group * Q_PITCH + HEADER_BYTES + 16
    return 1024 + stages * each + EXCHANGE_BYTES + 16


def num_ctas(meta: AttentionMeta, num_kv_heads: int, config: StreamConfig) -> int:
    """CTAs of the step's launches: all that are resident, or as many as the bounds can give work."""
    most = meta.num_decodes * num_kv_heads * max(1, triton.cdiv(meta.max_seq_len, UNIT * config.min_units))
    resident = config.ctas_per_sm * sm_count(meta.seq_lens.device)
    return int(min(resident, most, meta.workspace.shares.shape[0]))


def plan_shares(meta: AttentionMeta, num_kv_heads: int, window: int, config: StreamConfig) -> None:
    """Write the shares of this step into the workspace."""
    share_plan_kernel[(1,)](
        meta.seq_lens,
        meta.seq_slots,
        meta.workspace.shares,
        meta.num_decodes,
        num_kv_heads,
        window,
        num_ctas(meta, num_kv_heads, config),
        meta.workspace.shares.shape[0],
        config.min_units,
        config.tail_from,
        BLOCK_ROWS=max(16, triton.next_power_of_2(meta.num_decodes)),
        BLOCK_CTAS=triton.next_power_of_2(meta.workspace.shares.shape[0]),
        num_warps=4,
        **launch_options(meta.seq_lens.device),
    )


def launch_streams(
    inputs: Inputs, meta: AttentionMeta, plan_window: int, config: StreamConfig, *, settled: bool
) -> None:
    """Run the planned shares. The plan must be of the same configuration, number of KV heads and `plan_window`.

    `settled`: `meta.settled` holds of the plan too.
    """
    device = inputs.q.device
    arguments = decode_arguments(inputs, meta, plan_window, config.stages, settled=settled)
    name = f"sm90_{'e4m3' if inputs.fp8 else 'bf16'}_decode"
    shared = shared_bytes(1 if inputs.fp8 else 2, config.stages, inputs.group)
    chosen = cuda.kernel(STEM, ARCH, name, shared, THREADS, device.index or 0)
    grid = num_ctas(meta, inputs.k_cache.shape[1], config)
    cuda.launch(chosen, grid, [*decode_maps(inputs), arguments], device, pdl=pdl_on(device))


def decode_arguments(
    inputs: Inputs, meta: AttentionMeta, plan_window: int, stages: int, *, settled: bool
) -> DecodeArguments:
    """What the kernel is told of a step, with a ring of `stages`."""
    k, space = inputs.k_cache, meta.workspace
    _, kv_heads, page = k.shape[:3]
    page_rows, head_rows = _row_strides(inputs)
    return DecodeArguments(
        *(cuda.address_of(t) for t in (
            inputs.out, inputs.q, meta.page_table, meta.seq_lens, meta.seq_slots, space.shares, space.tickets,
            space.partial, space.partial_lse, space.arrivals, inputs.k_scale, inputs.v_scale, inputs.sinks,
            *((None, None) if inputs.before is None else (inputs.before.values, inputs.before.lse)),
        )),
        inputs.scale * LOG2E, inputs.softcap,
        inputs.window, plan_window, meta.num_decodes, kv_heads, inputs.group, inputs.q.stride(0), inputs.out.stride(0),
        meta.page_table.stride(0), page.bit_length() - 1, page_rows, head_rows, min(BOX_ROWS, page), stages,
        space.shares.shape[0], int(settled), 0 if inputs.before is None else inputs.before.parts,
        meta.fresh,
    )  # fmt: skip


def decode_maps(inputs: Inputs) -> list[ctypes.Array[ctypes.c_char]]:
    """The tensor maps of keys and values."""
    pages, kv_heads, page = inputs.k_cache.shape[:3]
    page_rows, head_rows = _row_strides(inputs)
    rows = (pages - 1) * page_rows + (kv_heads - 1) * head_rows + page
    kv_bytes, box_rows = 1 if inputs.fp8 else 2, min(BOX_ROWS, page)
    return [cache_map(t.data_ptr(), rows, kv_bytes, box_rows) for t in (inputs.k_cache, inputs.v_cache)]


def _row_strides(inputs: Inputs) -> tuple[int, int]:
    """Of pages and of heads, in rows of one token and head."""
    k, row = inputs.k_cache, HEAD_DIM * (1 if inputs.fp8 else 2)
    return int(k.stride(0)) * k.element_size() // row, int(k.stride(1)) * k.element_size() // row


@functools.cache
def cache_map(address: int, rows: int, kv_bytes: int, box_rows: int) -> ctypes.Array[ctypes.c_char]:
    """The tensor map of a cache as rows of one token and head each."""
    return cuda.tensor_map_at(address, rows, HEAD_DIM, HEAD_DIM, kv_bytes, box_rows)
