"""Device functions that decode and prefill attention share: those of paged keys (`launch/triton_tile.py`), and which
of them a pattern of blocks shows.

Knows nothing of splits or tiles of queries.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.launch.triton_tile import (
    UNPACK_CVT,
    UNPACK_PAIRS,
    UNPACK_PLAIN,
    add_values,
    dot_keys,
    page_offsets,
    soft_cap,
    unpack_e4m3,
)

__all__ = [
    "UNPACK_CVT",
    "UNPACK_PAIRS",
    "UNPACK_PLAIN",
    "add_values",
    "dot_keys",
    "page_offsets",
    "sees_block",
    "shown_tile",
    "shown_tiles",
    "soft_cap",
    "unpack_e4m3",
]


@triton.jit
def sees_block(query_block, key_block, head, local_blocks, block_stride, head_step):
    """Whether a head sees a block of keys from one of queries; `BlockPattern.sees`, `head` counted with its first."""
    strided = (key_block + 1 + head * head_step) % block_stride == 0
    return (query_block - key_block < local_blocks) | strided


@triton.jit
def shown_tiles(start, end, local_from, heads, block_shift, block_stride, head_step, BLOCK_N: tl.constexpr):
    """Of keys [start, end) the tiles that a pattern shows some of `heads` heads: (those before `local_from`, all).

    Before `local_from`, the first block that all queries see as near, these are the strided blocks of each head, period
    by period; a tile may lie outside [start, end). From there on it is every tile.
    """
    per_period = tl.where(head_step == 0, 1, tl.minimum(heads, block_stride)) * ((1 << block_shift) // BLOCK_N)
    period = block_stride << block_shift
    far_end = tl.minimum(end, local_from)
    periods = tl.where(start < far_end, tl.cdiv(far_end, period) - start // period, 0)
    far = periods * per_period
    return far, far + tl.cdiv(tl.maximum(end - tl.maximum(start, local_from), 0), BLOCK_N)


@triton.jit
def shown_tile(
    index,
    far,
    start,
    end,
    local_from,
    heads,
    first_head,
    block_shift,
    block_stride,
    head_step,
    BLOCK_N: tl.constexpr,
):
    """Tile `index` of `shown_tiles`, of which `far` lie before `local_from`: (first key, where its keys end)."""
    in_block = (1 << block_shift) // BLOCK_N
    per_period = tl.where(head_step == 0, 1, tl.minimum(heads, block_stride)) * in_block
    within = index % per_period
    place = block_stride - 1 - (first_head + within // in_block) * head_step % block_stride
    block = (start // (block_stride << block_shift) + index // per_period) * block_stride + place
    strided = (block << block_shift) + within % in_block * BLOCK_N
    near = tl.maximum(start, local_from) + (index - far) * BLOCK_N
    is_far = index < far
    return tl.where(is_far, strided, near), tl.where(is_far, tl.minimum(end, local_from), end)
