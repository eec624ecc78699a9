"""Latent attention on a GPU: queries brought to latents, the kernels, what was attended brought back.

Invariants: launch sizes depend on host integers alone (rows, tokens, bounds), and products per head are cuBLAS's, so a
captured graph serves any lengths.
Knows nothing of tile sizes, which `tiles.py` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from stoker_kernels.attention import AttentionMeta, split_decodes
from stoker_kernels.latent_attention.reference import check_scale
from stoker_kernels.latent_attention.shapes import Sizes, sizes_of
from stoker_kernels.latent_attention.tiles import Tile, absorbed_tile, widened_tile
from stoker_kernels.latent_attention.triton_absorbed import latent_context_kernel, latent_decode_kernel
from stoker_kernels.latent_attention.triton_widened import latent_prefill_kernel
from stoker_kernels.launch.dispatch import sm_of
from stoker_kernels.launch.pdl import launch_options
from stoker_kernels.quant import FP8

LOG2E = math.log2(math.e)
PROGRAMS_PER_SM = 2
LEAST_DIM = 16  # of a dot
Decode = Callable[[Tensor, Tensor, Tensor, Tensor, AttentionMeta, Sizes, float, Tensor | None], None]
Context = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionMeta, Sizes, float, Tensor | None], None]


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
    """`stoker_kernels.latent_attention.op.latent_attention` on a GPU, or on CPU tensors in Triton's interpreter."""
    return attend(q, own, cache, kv_b, meta, scale, cache_scale, decode_absorbed, context_absorbed)


def attend(
    q: Tensor,
    own: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    meta: AttentionMeta,
    scale: float,
    cache_scale: Tensor | None,
    decode: Decode,
    context: Context,
) -> Tensor:
    """The same with `decode` for the rows of one token and `context` for what lies in pages before the others.

    Both are given (q, absorbed, cache, attended, …, meta, sizes, scale, cache_scale): `absorbed [T,H,R]` are queries as
    latents, and `attended [T,H,R]` gets what they see of them; of context `lse [T,H]` fp32 the logarithm of the sum of
    weights to base 2, −∞ where there is none.
    """
    check_scale(cache, cache_scale)
    sizes = sizes_of(q, cache, kv_b)
    _refuse_misread(q, own, cache, kv_b, sizes)
    cache = cache if cache_scale is None else cache.view(torch.uint8)
    tokens, decodes = q.shape[0], meta.num_decodes
    chunks = meta.seq_lens.shape[0] > decodes or tokens > decodes
    absorbed = q.new_empty(tokens, sizes.heads, sizes.rank)
    torch.bmm(q[..., : sizes.nope].transpose(0, 1), kv_b[:, : sizes.nope], out=absorbed.transpose(0, 1))
    attended = torch.empty_like(absorbed)
    if decodes > 0:
        decode(q, absorbed, cache, attended, meta, sizes, scale, cache_scale)
    lse = None
    if chunks:
        lse = torch.empty(tokens, sizes.heads, dtype=torch.float32, device=q.device)
        context(q, absorbed, cache, attended, lse, meta, sizes, scale, cache_scale)
    out = q.new_empty(tokens, sizes.heads, sizes.value)
    torch.bmm(attended.transpose(0, 1), kv_b[:, sizes.nope :].transpose(1, 2), out=out.transpose(0, 1))
    if lse is not None:
        _chunks(q, own, kv_b, out, lse, meta, sizes, scale)
    return out


def plan(meta: AttentionMeta, heads: int, rank: int, itemsize: int) -> AttentionMeta:
    """`stoker_kernels.latent_attention.op.plan_latent_attention` on a GPU."""
    if meta.num_decodes > 0:
        block_m = absorbed_tile(heads, rank, itemsize, sm_of(meta.seq_lens.device)).block_m
        split_decodes(meta, programs=triton.cdiv(heads, block_m), programs_per_sm=PROGRAMS_PER_SM)
    return replace(meta, planned_window=0)


def decode_absorbed(
    q: Tensor,
    absorbed: Tensor,
    cache: Tensor,
    out: Tensor,
    meta: AttentionMeta,
    sizes: Sizes,
    scale: float,
    cache_scale: Tensor | None,
) -> None:
    """The decode rows by Triton; planned now, unless the step's plan is there and of the kind."""
    tile = absorbed_tile(sizes.heads, sizes.rank, q.itemsize, sm_of(q.device))
    head_tiles = triton.cdiv(sizes.heads, tile.block_m)
    planned = meta.planned_window is not None and not meta.planned_shares
    items = split_decodes(meta, programs=head_tiles, programs_per_sm=PROGRAMS_PER_SM, planned=planned)
    space = meta.workspace
    latent_decode_kernel[(items * head_tiles,)](
        absorbed,
        q,
        cache,
        out,
        meta.page_table,
        space.items,
        space.num_items,
        space.partial,
        space.partial_lse,
        space.arrivals,
        cache_scale,
        scale * LOG2E,
        head_tiles,
        sizes.heads,
        q.stride(0),
        q.shape[2],
        meta.page_table.stride(0),
        cache.stride(0),
        cache.shape[2].bit_length() - 1,
        sizes.rank,
        sizes.rope,
        **_absorbed_options(tile, q, cache, sizes),
    )


def context_absorbed(
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
    """What lies in pages before the chunks, by Triton."""
    first, tokens = meta.num_decodes, q.shape[0]
    rows = meta.seq_lens.shape[0] - first
    sm = sm_of(q.device)
    tile = absorbed_tile(max(sizes.heads, 64), sizes.rank, q.itemsize, sm)
    group = min(sizes.heads, tile.block_m)
    groups = triton.cdiv(sizes.heads, group)
    tiles = (tokens - first) // (tile.block_m // group) + rows + 1
    latent_context_kernel[(tiles * groups,)](
        absorbed,
        q,
        cache,
        out,
        lse,
        meta.page_table,
        meta.seq_slots,
        meta.query_start,
        meta.seq_lens,
        cache_scale,
        scale * LOG2E,
        group,
        groups,
        sizes.heads,
        rows,
        tokens,
        first,
        q.stride(0),
        q.shape[2],
        meta.page_table.stride(0),
        cache.stride(0),
        cache.shape[2].bit_length() - 1,
        sizes.rank,
        sizes.rope,
        **_absorbed_options(tile, q, cache, sizes),
    )


def _chunks(
    q: Tensor,
    own: Tensor,
    kv_b: Tensor,
    out: Tensor,
    lse: Tensor,
    meta: AttentionMeta,
    sizes: Sizes,
    scale: float,
) -> None:
    """The chunks' own keys and values, and padding."""
    first, tokens = meta.num_decodes, q.shape[0]
    rows = meta.seq_lens.shape[0] - first
    widened = torch.mm(own[first:, : sizes.rank], kv_b.flatten(0, 1).t())
    blocks = (_block(sizes.nope), _block(sizes.value))
    tile = widened_tile(q.itemsize, sm_of(q.device), max(blocks))
    tiles = (tokens - first) // tile.block_m + rows + 1
    latent_prefill_kernel[(tiles * sizes.heads,)](
        q,
        widened,
        own,
        out,
        lse,
        meta.query_start,
        meta.seq_lens,
        scale * LOG2E,
        sizes.heads,
        rows,
        tokens,
        first,
        q.stride(0),
        q.shape[2],
        sizes.rank,
        sizes.rope,
        sizes.value,
        BLOCK_M=tile.block_m,
        BLOCK_D=blocks[0],
        BLOCK_P=_block(sizes.rope),
        BLOCK_V=blocks[1],
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        PRECISION=_precision(q),
        num_warps=tile.num_warps,
        **launch_options(q.device),
    )


def _refuse_misread(q: Tensor, own: Tensor, cache: Tensor, kv_b: Tensor, sizes: Sizes) -> None:
    """Raise ValueError for inputs the kernels would misread."""
    page, width = cache.shape[2], sizes.rank + sizes.rope
    checks = (
        (q.stride(2) == 1 and q.stride(1) == q.shape[2], "q's heads must be contiguous in a token"),
        (own.is_contiguous() and own.shape == (q.shape[0], width), f"own is {tuple(own.shape)}, not a token's {width}"),
        (cache.stride(2) == width, "a page's tokens must be contiguous"),
        (page & (page - 1) == 0, f"a page holds a power of two of tokens, not {page}"),
        (
            q.dtype == kv_b.dtype and cache.dtype in (q.dtype, FP8),
            f"q is {q.dtype}, the cache {cache.dtype}, kv_b {kv_b.dtype}",
        ),
        (kv_b.is_contiguous(), "kv_b must be contiguous"),
    )
    for good, message in checks:
        if not good:
            raise ValueError(f"latent_attention: {message}")


def _block(size: int) -> int:
    return max(LEAST_DIM, int(triton.next_power_of_2(size)))


def _absorbed_options(tile: Tile, q: Tensor, cache: Tensor, sizes: Sizes) -> dict[str, Any]:
    """What the two kernels on latents are compiled for."""
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_R": _block(sizes.rank),
        "BLOCK_P": _block(sizes.rope),
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "WHOLE": cache.shape[2] >= tile.block_n,
        "PRECISION": _precision(q),
        "num_warps": tile.num_warps,
        **launch_options(q.device),
    }


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype is torch.float32 else "tf32"
