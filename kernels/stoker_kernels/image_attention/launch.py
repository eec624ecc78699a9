"""Launches the kernel of images, after a look at what it would misread.

Invariants: the launch size follows from host integers alone (images, their most rows, KV heads), so that a captured
graph serves any images within them. Knows nothing of dispatch.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from stoker_kernels.image_attention.tiles import EXACT_DIMS, NO_WINDOW, tile_dim, tile_for
from stoker_kernels.image_attention.triton_image import image_kernel
from stoker_kernels.image_attention.types import ImageSpans
from stoker_kernels.launch.dispatch import sm_of
from stoker_kernels.launch.pdl import launch_options
from stoker_kernels.launch.triton_tile import unpack_of

LOG2E = math.log2(math.e)


def image_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    spans: ImageSpans,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """`stoker_kernels.image_attention.op.image_attention` on a GPU, or on CPU tensors in Triton's interpreter."""
    _refuse_misread(q, k_cache, v_cache, page_table, spans, k_scale, v_scale, out)
    images = spans.slots.shape[0]
    if images == 0 or spans.most_rows == 0:
        return out
    (_, q_heads, dim), (_, kv_heads, page, _) = q.shape, k_cache.shape
    group, kv_bytes, fp8 = q_heads // kv_heads, k_cache.dtype.itemsize, k_scale is not None
    tile = tile_for(dim, kv_bytes, sm_of(q.device))
    block_m = max(tile.block_m, triton.next_power_of_2(group))
    tiles = triton.cdiv(spans.most_rows, block_m // group)
    exact = dim in EXACT_DIMS and q.dtype is not torch.float32
    if fp8:
        k_cache, v_cache = k_cache.view(torch.uint16), v_cache.view(torch.uint16)
    image_kernel[(images * tiles * kv_heads,)](
        q,
        k_cache,
        v_cache,
        out,
        page_table,
        spans.slots,
        spans.rows,
        spans.counts,
        spans.begins,
        spans.ends,
        k_scale,
        v_scale,
        scale * LOG2E,
        softcap,
        NO_WINDOW if window == 0 and not exact else window,
        kv_heads,
        tiles,
        q.stride(0),
        out.stride(0),
        page_table.stride(0),
        *k_cache.stride()[:3],
        group,
        dim,
        page.bit_length() - 1,
        BLOCK_M=block_m,
        BLOCK_D=tile_dim(dim) // (2 if fp8 else 1),
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        EXACT=exact,
        WHOLE=exact and page >= tile.block_n,
        FP8=fp8,
        WINDOW=window > 0 or not exact,
        SOFTCAP=softcap > 0.0,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        UNPACK=unpack_of(fp8=fp8, cvt=tile.cvt),
        num_warps=tile.num_warps,
        **launch_options(q.device),
    )
    return out


def _refuse_misread(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    spans: ImageSpans,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
) -> None:
    """Raise ValueError for inputs that the kernel would misread."""
    page, dim, fp8 = k.shape[2], q.shape[2], k.dtype is torch.float8_e4m3fn
    fields = (spans.slots, spans.rows, spans.counts, spans.begins, spans.ends)
    checks = [
        (q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads do not divide into {k.shape[1]} KV heads"),
        (
            k.shape == v.shape and k.stride() == v.stride() and k.stride(3) == 1 and k.shape[3] == dim,
            f"k_cache and v_cache need {dim} values a head and equal strides, the last of them 1",
        ),
        (out.shape == q.shape and out.dtype == q.dtype, "out needs the shape and type of q"),
        (q.stride(2) == 1 and q.stride(1) == dim, "q's heads must be contiguous in a token"),
        (out.stride(2) == 1 and out.stride(1) == dim, "out's heads must be contiguous in a token"),
        (page & (page - 1) == 0 and page >= 16, f"page size {page} is not a power of two from 16 on"),
        (fp8 == (k_scale is not None), "an e4m3 cache needs k_scale, and no other takes it"),
        (fp8 == (v_scale is not None), "an e4m3 cache needs v_scale, and no other takes it"),
        (fp8 or k.dtype == v.dtype == q.dtype, f"q is {q.dtype} but the caches {k.dtype} and {v.dtype}"),
        (dim % 2 == 0 or not fp8, f"an e4m3 cache is read by pairs, and heads have {dim} values"),
        (page_table.dtype is torch.int32 and page_table.stride(1) == 1, "page_table needs lines of int32, end to end"),
        (
            all(each.dtype is torch.int32 and each.shape == fields[0].shape and each.dim() == 1 for each in fields)
            and all(each.is_contiguous() for each in fields),
            "the fields of spans are contiguous int32, one number for each image",
        ),
    ]
    for good, message in checks:
        if not good:
            raise ValueError(f"image_attention: {message}")
