"""When a shared prefix is attended once for all rows, in which tiles, and in how many parts.

Invariants: pure; what is chosen here changes rounding and speed, never which result is right.
Knows nothing of tensors but their types.
"""

from __future__ import annotations

import torch

from stoker_kernels.attention.config import SHORT_CHUNK, PrefillConfig, prefill_config
from stoker_kernels.launch.chip import chip_of

SM = 90
LONG_CHUNK = 8192
# Queries (rows · heads of the group) from which on tiles of 128 are filled better than those of 64.
WIDE_QUERIES = 256
# Parts of the keys, at most: each is read back by the row's own kernel.
MOST_PARTS = 16
# Tiles at work at a time: an H200's SMs, of which each holds one wide tile or two others.
RESIDENT = 132
# What plain attention reads at, and what two more launches, the parts and their merging take of a layer.
READ_BYTES_PER_SECOND = 4.5e12
EXTRA_SECONDS = 8e-6


def tile_of(rows: int, group: int, head_dim: int, kv_bytes: int) -> PrefillConfig:
    """The tile for `rows` rows of `group` query heads a KV head: that of a chunk, which this is, causality aside."""
    return prefill_config(head_dim, kv_bytes, SM, LONG_CHUNK if rows * group > WIDE_QUERIES else SHORT_CHUNK)


def parts_of(rows: int, num_kv_heads: int, group: int, head_dim: int, kv_bytes: int) -> int:
    """How many programs share the keys of one tile of queries: as many as let all SMs work, up to MOST_PARTS."""
    block = tile_of(rows, group, head_dim, kv_bytes).block_m
    resident = RESIDENT * (2 if block < 128 else 1)
    return max(1, min(MOST_PARTS, resident // (-(-rows * group // block) * num_kv_heads)))


def prefix_pays(rows: int, keys: int, *, num_kv_heads: int, head_dim: int, kv_bytes: int) -> bool:
    """Whether `rows` rows that begin with the same `keys` keys are to attend them together.

    Plain attention reads the prefix once a row, most of it from the L2, at about what an H200 reads its memory at; a
    shared one is read once, by tiles of 64 queries or more, whose products hide behind what is saved. For that a layer
    pays two launches and the results of the parts. So it pays where what is not read again would take longer than
    that: 36 MB, which with 4 KV heads of 128 in bf16 are 16 rows of 1,200 keys. The figures are estimates; LAB.md says
    what was measured.
    """
    saved = (rows - 1) * keys * num_kv_heads * head_dim * 2 * kv_bytes
    return saved > READ_BYTES_PER_SECOND * EXTRA_SECONDS


def prefix_refusal(sm: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """None where steps of this model may share prefixes, else why not. `sm`: of the GPU, 0 for a CPU."""
    if sm == 0 or not chip_of(sm).wgmma:
        return "made for SM 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return "takes bfloat16 and float16"
    if kv_dtype not in (dtype, torch.float8_e4m3fn):
        return "takes a cache of the model's type or of e4m3"
    return None
