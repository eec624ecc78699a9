"""When a shared prefix is attended once for all rows, in which tiles, and in how many parts.

Invariants: pure; what is chosen here changes rounding and speed, never which result is right.
Knows nothing of tensors but their types.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_kernels.launch.chip import chip_of

SM = 90
# Queries (rows · heads of the group) from which on tiles of 128 are filled better than those of 64.
WIDE_QUERIES = 256
# Parts of the keys, at most: each is read back by the row's own kernel.
MOST_PARTS = 16
# Tiles at work at a time: an H200's SMs, of which each holds one wide tile or two others.
RESIDENT = 132
# Bytes of keys and values that a layer does not read again, from which on that is worth two more launches, the parts
# and their merging, by their width: between 66 and 252 MB in 16 bits, 134 and 528 in e4m3 (H200).
BREAK_EVEN = {2: 150e6, 1: 480e6}


@dataclass(frozen=True, slots=True)
class PrefixTile:
    """`block_m` queries against `block_n` keys; the rest as of `DecodeConfig`."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    stages: int = 5
    cvt: bool = False


def tile_of(rows: int, group: int, head_dim: int, kv_bytes: int) -> PrefixTile:
    """The tile for `rows` rows of `group` query heads a KV head: those of chunks, which this is, causality aside."""
    if head_dim > 128 or kv_bytes > 2:
        return PrefixTile(block_n=32, stages=3)
    if kv_bytes == 1 or rows * group <= WIDE_QUERIES:
        return PrefixTile(cvt=kv_bytes == 1)
    return PrefixTile(block_m=128, num_warps=8)


def parts_of(rows: int, num_kv_heads: int, group: int, head_dim: int, kv_bytes: int) -> int:
    """How many programs share the keys of one tile of queries: as many as let all SMs work, up to MOST_PARTS."""
    block = tile_of(rows, group, head_dim, kv_bytes).block_m
    resident = RESIDENT * (2 if block < 128 else 1)
    return max(1, min(MOST_PARTS, resident // (-(-rows * group // block) * num_kv_heads)))


def prefix_pays(rows: int, keys: int, *, num_kv_heads: int, head_dim: int, kv_bytes: int) -> bool:
    """Whether `rows` rows that begin with the same `keys` keys are to attend them together.

    Plain attention reads the prefix once a row, most of it from the L2; a shared one is read once, by tiles of 64
    queries or more. For that a layer pays two launches and the results of the parts. So it pays where BREAK_EVEN and
    more are not read again, which with 4 KV heads of 128 in bf16 are 16 rows of 4,900 keys. LAB.md says what was
    measured.
    """
    saved = (rows - 1) * keys * num_kv_heads * head_dim * 2 * kv_bytes
    return kv_bytes in BREAK_EVEN and saved > BREAK_EVEN[kv_bytes]


def prefix_refusal(sm: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """None where steps of this model may share prefixes, else why not. `sm`: of the GPU, 0 for a CPU."""
    if sm == 0 or not chip_of(sm).wgmma:
        return "made for SM 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return "takes bfloat16 and float16"
    if kv_dtype not in (dtype, torch.float8_e4m3fn):
        return "takes a cache of the model's type or of e4m3"
    return None
