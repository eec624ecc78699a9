"""Tile sizes of the kernel of images, by head dimension, cache type and SM.

Invariants: a tile depends on nothing else, so that a row's bits do not depend on the step; every tile fits the shared
memory of its SM. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_kernels.launch.triton_tile import padded_dim

# Head dimensions with kernels of their own, those of Gemma 3; others run in a tile of these, its rest masked.
EXACT_DIMS = (128, 256)
TILE_DIMS = (64, *EXACT_DIMS)
NO_WINDOW = 1 << 30  # keys: wider than any context


@dataclass(frozen=True, slots=True)
class Tile:
    """`block_m` rows of (token, head of the group) against `block_n` keys; `cvt`: e4m3 is unpacked by instruction."""

    block_m: int = 64
    block_n: int = 32
    num_warps: int = 4
    stages: int = 3
    cvt: bool = False


def tile_for(head_dim: int, kv_bytes: int, sm: int) -> Tile:
    """The tile for `kv_bytes` a cached element: prefill's for short chunks, which is what an image is."""
    dim = padded_dim(head_dim)
    if dim > 128 and (kv_bytes > 2 or sm < 80):  # SM 7.5 has 64 KB of shared memory, and fp32 takes twice as much
        return Tile(block_m=16, block_n=16, stages=2)
    if sm == 90:
        if dim > 128 or kv_bytes > 2:
            return Tile()
        return Tile(block_n=64, stages=5, cvt=kv_bytes == 1)
    if dim > 128 or kv_bytes > 2:
        return Tile(block_n=16, stages=2)
    return Tile()


def tile_dim(head_dim: int) -> int:
    """The head dimension of the tile that holds `head_dim`."""
    return max(TILE_DIMS[0], padded_dim(head_dim))
