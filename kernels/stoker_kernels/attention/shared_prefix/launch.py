"""Launches the kernels of a shared prefix: the cut of a step, and in each layer the prefix, then what rows have alone.

Invariants: launch sizes depend on host integers alone, so that a captured graph serves any lengths.
Knows nothing of which kernel attends the rest of a row (`attention.choose`).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from stoker_kernels.attention import choose
from stoker_kernels.attention.inputs import Inputs, inputs_of
from stoker_kernels.attention.meta import AttentionMeta, SharedPrefix
from stoker_kernels.attention.shared_prefix.config import tile_of
from stoker_kernels.attention.shared_prefix.space import PrefixSpace
from stoker_kernels.attention.shared_prefix.triton_shared import CUT_PAGES, cut_prefix_kernel, shared_prefix_kernel
from stoker_kernels.attention.triton_launch import LOG2E, exact, tile_dim
from stoker_kernels.launch.pdl import launch_options
from stoker_kernels.launch.triton_tile import unpack_of


def cut_prefix(meta: AttentionMeta, space: PrefixSpace) -> None:
    """`stoker_kernels.attention.shared_prefix.op.cut_prefix`, what it writes, on a GPU."""
    pages = space.table.shape[1]
    cut_prefix_kernel[(meta.num_decodes, triton.cdiv(pages, CUT_PAGES))](
        meta.page_table,
        meta.seq_slots,
        meta.seq_lens,
        space.keys,
        space.table,
        space.lens,
        meta.page_table.stride(0),
        pages,
        space.sizes.page_size.bit_length() - 1,
        BLOCK=CUT_PAGES,
        num_warps=4,
        **launch_options(space.table.device),
    )


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`stoker_kernels.attention.shared_prefix.op.shared_prefix_attention` on a GPU, or in Triton's interpreter."""
    shared = meta.shared
    assert shared is not None, "the step has no shared prefix"
    inputs = inputs_of(
        q, k_cache, v_cache, meta, scale=scale, k_scale=k_scale, v_scale=v_scale, out=out, before=shared.results
    )  # fmt: skip
    _launch_prefix(inputs, meta, shared)
    choose.attend(inputs, meta)
    return inputs.out


def _launch_prefix(inputs: Inputs, meta: AttentionMeta, shared: SharedPrefix) -> None:
    """Attend the shared keys for all rows, in the parts that there is room for."""
    q, k, results = inputs.q, inputs.k_cache, shared.results
    rows, num_kv_heads, group, head_dim = meta.num_decodes, k.shape[1], inputs.group, q.shape[2]
    config = tile_of(rows, group, head_dim, inputs.kv_bytes)
    shared_prefix_kernel[(triton.cdiv(rows * group, config.block_m), results.parts, num_kv_heads)](
        q,
        k,
        inputs.v_cache,
        results.values,
        results.lse,
        shared.page_table,
        shared.seq_slots,
        meta.seq_lens,
        shared.keys,
        inputs.k_scale,
        inputs.scale * LOG2E,
        rows,
        num_kv_heads,
        results.parts,
        q.stride(0),
        shared.page_table.stride(0),
        *k.stride()[:3],
        group,
        head_dim,
        inputs.page_shift,
        BLOCK_M=config.block_m,
        BLOCK_D=tile_dim(head_dim) // (2 if inputs.fp8 else 1),
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        EXACT=exact(inputs),
        WHOLE=exact(inputs) and k.shape[2] >= config.block_n,
        FP8=inputs.fp8,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        UNPACK=unpack_of(fp8=inputs.fp8, cvt=config.cvt),
        num_warps=config.num_warps,
        **launch_options(q.device),
    )
