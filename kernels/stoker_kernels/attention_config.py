"""Tile sizes and split rules of the attention kernels, by head dimension, cache type and SM.

Invariants: a configuration never changes which result is right, only its rounding and its speed; those chosen here fit
the shared memory of their SM. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """`block_n` keys a step; `stages` is Triton's count, of which a page lookup in the loop takes about half.

    Splits: `programs_per_sm` resident programs share the keys of a step equally, in items of `min_split` (a multiple of
    block_n) to `max_split` keys, with room for `slack` times as many items as programs besides one per row.
    `cvt`: e4m3 is unpacked by the conversion instruction (SM 8.9 on), else by integer operations.
    """

    block_n: int = 64
    num_warps: int = 4
    stages: int = 7
    min_split: int = 128
    max_split: int = 1024
    programs_per_sm: int = 2
    slack: int = 2
    cvt: bool = False


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """`block_m` rows of (token, head of the group) against `block_n` keys."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    stages: int = 5
    cvt: bool = False


def padded_dim(head_dim: int) -> int:
    """The head dimension as a tile holds it: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def decode_config(head_dim: int, kv_bytes: int, sm: int) -> DecodeConfig:
    """The configuration for `kv_bytes` a cached element. Below SM 8.0 nothing is pipelined, so stages mean nothing."""
    row = padded_dim(head_dim) * kv_bytes
    roomy = sm in (80, 87, 90, 100, 103)
    if row > 256:
        return DecodeConfig(block_n=32, stages=5, min_split=128)
    if row <= 128:
        return DecodeConfig(stages=7, programs_per_sm=4)
    return DecodeConfig(stages=7 if roomy else 5)


def prefill_config(head_dim: int, kv_bytes: int, sm: int) -> PrefillConfig:
    """The configuration for `kv_bytes` a cached element."""
    dim = padded_dim(head_dim)
    if sm == 90:
        if dim > 128 or kv_bytes > 2:
            return PrefillConfig(block_m=64, block_n=32, num_warps=4, stages=3)
        return PrefillConfig()
    if dim > 128 or kv_bytes > 2:
        return PrefillConfig(block_m=64, block_n=16, num_warps=4, stages=2)
    return PrefillConfig(block_m=64, block_n=32, num_warps=4, stages=3)
