"""Latent attention on Hopper: latents as cached, in bf16 or e4m3, by csrc/sm90_latent, what is widened by Triton.

Invariants: a launch's size depends on host integers alone; results are the same bit for bit from launch to launch.
What the kernels do not take runs by Triton (`latent_refusal`), so that every call is served.
Knows nothing of chunks' own keys.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from stoker_kernels.attention import AttentionMeta
from stoker_kernels.latent_attention.shapes import Sizes
from stoker_kernels.latent_attention.triton_launch import LOG2E, attend, context_absorbed, decode_absorbed
from stoker_kernels.latent_attention.triton_launch import plan as triton_plan
from stoker_kernels.latent_attention.triton_plan import latent_plan_kernel
from stoker_kernels.launch import cuda
from stoker_kernels.launch.dispatch import sm_count
from stoker_kernels.launch.pdl import launch_options, pdl_on

STEM, E4M3_STEM, ARCH = "sm90_latent", "sm90_latent_e4m3", "sm_90a"
DECODE, CONTEXT = "latent", "latent_context"
RANK, ROPE, WIDTH = 512, 64, 576
TILE_HEADS, TILE_KEYS = 64, 64
THREADS, COMBINE_THREADS = 384, 128
STATE_FLOATS, BARRIERS = 6 * TILE_HEADS, 12
SHARED_BYTES = 1024 + 3 * TILE_KEYS * WIDTH * 2 + 32 + STATE_FLOATS * 4 + BARRIERS * 8
LEAST_PAGE = 8  # tokens: a box is at least a group of rows of the swizzle
MIN_TILES = 2  # of a piece of a row
FEW_HEADS, MANY_ROWS = 16, 128
BLOCK_PARTS = 256  # more than a GPU has SMs
CLUSTER = 2
BYTES = (torch.float8_e4m3fn, torch.uint8)  # a cache in e4m3, and as `attend` hands it on
COMBINE_CTAS = 2048  # about as many as are resident together
SUMMED = (4, 16)  # partial results that a combining kernel has under way together

_POINTERS = (
    *("out", "partial", "partial_lse", "page_table", "items", "parts"),
    *("lse", "seq_slots", "query_start", "seq_lens"),
)
_NUMBERS = (
    *("rows", "tokens", "first_token", "heads", "head_tiles", "group", "table_stride", "page_shift"),
    *("page_rows", "box_rows"),
)


class LatentArguments(ctypes.Structure):
    """LatentArguments of csrc/latent_ring.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_int) for name in _NUMBERS),
    ]


class ByteCache(ctypes.Structure):
    """ByteCache of csrc/latent_widen.cuh."""

    _fields_ = [("bytes", ctypes.c_void_p), ("scale", ctypes.c_void_p)]


def latent_attention(
    q: Tensor,
    own: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """`stoker_kernels.latent_attention.op.latent_attention` on SM 9.0."""
    return attend(q, own, cache, kv_b, meta, scale, cache_scale, _decode, _context)


def plan(meta: AttentionMeta, heads: int, rank: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionMeta:
    """`stoker_kernels.latent_attention.op.plan_latent_attention` on SM 9.0."""
    if model_refusal(rank, dtype, kv_dtype) is not None or not decode_pays(heads, meta.num_decodes, kv_dtype):
        return triton_plan(meta, heads, rank, dtype.itemsize)
    if meta.num_decodes > 0:
        plan_parts(meta, heads)
    return replace(meta, planned_window=0, planned_shares=True)


def model_refusal(rank: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """None where the kernels are for a model, else why not."""
    if rank != RANK:
        return f"takes latents of {RANK}, not {rank}"
    if dtype is not torch.bfloat16 or kv_dtype not in (torch.bfloat16, *BYTES):
        return f"takes queries of bfloat16 and a cache of it or e4m3, not {dtype} and {kv_dtype}"
    return None


def latent_refusal(q: Tensor, cache: Tensor, sizes: Sizes, scale: float) -> str | None:
    """None where the kernels run these tensors, else why not."""
    page, page_stride = cache.shape[2], cache.stride(0)
    refusal = model_refusal(sizes.rank, q.dtype, cache.dtype)
    if refusal is not None:
        return refusal
    if sizes.rope != ROPE:
        return f"takes rotated parts of {ROPE}, not {sizes.rope}"
    if page < LEAST_PAGE:
        return f"takes pages of {LEAST_PAGE} tokens and more, not {page}"
    if scale <= 0.0:
        return f"takes a positive scale, not {scale}"
    if page_stride % WIDTH or cache.data_ptr() % 16 or q.data_ptr() % 16 or q.stride(0) % 8 or sizes.nope % 8:
        return "rows do not start on multiples of 16 bytes, or pages not on whole rows"
    return None


def decode_pays(heads: int, rows: int, kv_dtype: torch.dtype) -> bool:
    """Whether decode is not slower than by Triton: a quarter of a tile of heads and many rows in bf16 are (LAB.md)."""
    return heads > FEW_HEADS or rows < MANY_ROWS or kv_dtype in BYTES


def part_count(meta: AttentionMeta, heads: int) -> int:
    """Parts that the step's keys are dealt to: one an SM and tile of heads, or as many as the bounds can fill."""
    most = meta.num_decodes * triton.cdiv(max(meta.max_seq_len, 1), TILE_KEYS * MIN_TILES)
    return int(max(1, min(sm_count(meta.seq_lens.device) // triton.cdiv(heads, TILE_HEADS), most, BLOCK_PARTS - 1)))


def plan_parts(meta: AttentionMeta, heads: int) -> None:
    """Write this step's items and parts into the workspace."""
    latent_plan_kernel[(1,)](
        meta.seq_lens,
        meta.seq_slots,
        meta.workspace.items,
        meta.workspace.shares,
        meta.num_decodes,
        part_count(meta, heads),
        MIN_TILES,
        BLOCK_ROWS=max(16, triton.next_power_of_2(meta.num_decodes)),
        BLOCK_PARTS=BLOCK_PARTS,
        num_warps=4,
        **launch_options(meta.seq_lens.device),
    )


def decode_arguments(out: Tensor, cache: Tensor, meta: AttentionMeta, scale: float) -> LatentArguments:
    """What the kernels are told of the rows of one token."""
    space, heads = meta.workspace, out.shape[1]
    plan = (space.partial, space.partial_lse, meta.page_table, space.items, space.shares)
    return LatentArguments(
        *(cuda.address_of(tensor) for tensor in (out, *plan, None, None, None, None)),
        scale * LOG2E, meta.num_decodes, meta.num_decodes, 0, heads, triton.cdiv(heads, TILE_HEADS), TILE_HEADS,
        *_pages(cache, meta),
    )  # fmt: skip


def context_arguments(out: Tensor, lse: Tensor, cache: Tensor, meta: AttentionMeta, scale: float) -> LatentArguments:
    """What the kernel is told of the chunks. A tile of queries is a group of heads of as many tokens as it holds."""
    first, (tokens, heads, _) = meta.num_decodes, out.shape
    group = min(heads, TILE_HEADS)
    rows = (lse, meta.seq_slots[first:], meta.query_start[first:], meta.seq_lens[first:])
    return LatentArguments(
        *(cuda.address_of(tensor) for tensor in (out, None, None, meta.page_table, None, None, *rows)),
        scale * LOG2E, meta.seq_lens.shape[0] - first, tokens, first, heads, triton.cdiv(heads, group), group,
        *_pages(cache, meta),
    )  # fmt: skip


def _pages(cache: Tensor, meta: AttentionMeta) -> tuple[int, int, int, int]:
    page = cache.shape[2]
    return meta.page_table.stride(0), page.bit_length() - 1, cache.stride(0) // WIDTH, min(TILE_KEYS, page)


def cluster_of(head_tiles: int, kv_dtype: torch.dtype) -> int:
    """CTAs that read keys together: two tiles of heads in bf16 do, others find keys in L2."""
    return CLUSTER if head_tiles == CLUSTER and kv_dtype not in BYTES else 1


def combine_heads(rows: int, heads: int) -> int:
    """Heads that a CTA of the combining kernel takes."""
    return int(max(1, triton.cdiv(rows * heads, COMBINE_CTAS)))


def _decode(
    q: Tensor,
    absorbed: Tensor,
    cache: Tensor,
    out: Tensor,
    meta: AttentionMeta,
    sizes: Sizes,
    scale: float,
    cache_scale: Tensor | None,
) -> None:
    """The decode rows; planned now, unless the step's plan is there and of the kind."""
    if latent_refusal(q, cache, sizes, scale) is not None or not decode_pays(
        sizes.heads, meta.num_decodes, cache.dtype
    ):
        decode_absorbed(q, absorbed, cache, out, meta, sizes, scale, cache_scale)
        return
    if meta.planned_window is None or not meta.planned_shares:
        plan_parts(meta, sizes.heads)
    launch_parts(q, absorbed, cache, out, meta, sizes, scale, cache_scale)


def launch_parts(
    q: Tensor,
    absorbed: Tensor,
    cache: Tensor,
    out: Tensor,
    meta: AttentionMeta,
    sizes: Sizes,
    scale: float,
    cache_scale: Tensor | None,
) -> None:
    """Run the planned parts, and add up the rows that are in pieces."""
    device, rows = q.device, meta.num_decodes
    arguments, parts = decode_arguments(out, cache, meta, scale), part_count(meta, sizes.heads)
    _launch(DECODE, q[:rows], absorbed[:rows], cache, arguments, parts, sizes, cache_scale)
    each = combine_heads(rows, sizes.heads)
    name = f"sm90_bf16_latent_combine_{summed(parts, rows)}"
    combine = cuda.kernel(STEM, ARCH, name, 0, COMBINE_THREADS, device.index or 0)
    grid = rows * triton.cdiv(sizes.heads, each)
    cuda.launch(combine, grid, [arguments, ctypes.c_int(each)], device, pdl=pdl_on(device))


def _context(
    q: Tensor,
    absorbed: Tensor,
    cache: Tensor,
    out: Tensor,
    lse: Tensor,
    meta: AttentionMeta,
    sizes: Sizes,
    scale: float,
    cache_scale: Tensor | None,
) -> None:
    """What lies in pages before the chunks."""
    if latent_refusal(q, cache, sizes, scale) is not None:
        context_absorbed(q, absorbed, cache, out, lse, meta, sizes, scale, cache_scale)
        return
    launch_context(q, absorbed, cache, out, lse, meta, sizes, scale, cache_scale)


def launch_context(
    q: Tensor,
    absorbed: Tensor,
    cache: Tensor,
    out: Tensor,
    lse: Tensor,
    meta: AttentionMeta,
    sizes: Sizes,
    scale: float,
    cache_scale: Tensor | None,
) -> None:
    """Attend the context of the chunks; `lse` is −∞ where there is none."""
    lse.fill_(-math.inf)
    arguments = context_arguments(out, lse, cache, meta, scale)
    first, tokens = meta.num_decodes, q.shape[0]
    tiles = (tokens - first) // (TILE_HEADS // arguments.group) + arguments.rows + 1
    parts = max(1, min(sm_count(q.device) // arguments.head_tiles, tiles))
    _launch(CONTEXT, q, absorbed, cache, arguments, parts, sizes, cache_scale)


def _launch(
    kind: str,
    q: Tensor,
    absorbed: Tensor,
    cache: Tensor,
    arguments: LatentArguments,
    parts: int,
    sizes: Sizes,
    cache_scale: Tensor | None,
) -> None:
    """Run `parts` parts of each tile of heads."""
    box = (TILE_HEADS // arguments.group, arguments.group)
    maps = [cuda.tensor_map_3d(absorbed, box), cuda.tensor_map_3d(q[..., sizes.nope :], box)]
    held: Any
    if cache_scale is None:
        stem, name = STEM, f"sm90_bf16_{kind}"
        cache_rows = (cache.shape[0] - 1) * arguments.page_rows + cache.shape[2]
        held = _cache_map(cache.data_ptr(), cache_rows, arguments.box_rows)
    else:
        stem, name = E4M3_STEM, f"sm90_e4m3_{kind}"
        held = ByteCache(cuda.address_of(cache), cuda.address_of(cache_scale))
    chosen = cuda.kernel(stem, ARCH, name, SHARED_BYTES, THREADS, q.device.index or 0)
    grid, cluster = parts * arguments.head_tiles, cluster_of(arguments.head_tiles, cache.dtype)
    cuda.launch(chosen, grid, [*maps, held, arguments], q.device, pdl=pdl_on(q.device), cluster=cluster)


def summed(parts: int, rows: int) -> int:
    """Which combining kernel: few rows have many pieces each, and many rows want many CTAs."""
    return SUMMED[parts > 8 * rows]


@functools.cache
def _cache_map(address: int, rows: int, box_rows: int) -> ctypes.Array[ctypes.c_char]:
    """The tensor map of a cache as rows of one token each."""
    return cuda.tensor_map_at(address, rows, WIDTH, WIDTH, 2, box_rows)
