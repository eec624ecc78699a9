"""The sizes of latent attention, as they follow from the tensors of a call, checked.

Invariants: what passes `sizes_of` is read by every implementation as it is meant.
Knows nothing of devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """`heads` H; of a head `nope` N dimensions that do not rotate, `rope` P that do, `value` V; latents of `rank` R."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


def sizes_of(q: Tensor, cache: Tensor, kv_b: Tensor) -> Sizes:
    """From `q [T,H,N+P]`, `cache [P,1,B,R+P]` and `kv_b [H,N+V,R]`. Raises ValueError where they do not fit."""
    heads, widened, rank = kv_b.shape
    rope = cache.shape[3] - rank
    nope = q.shape[2] - rope
    sizes = Sizes(heads, nope, rope, widened - nope, rank)
    problems = (
        (q.shape[1] != heads, f"{q.shape[1]} heads of queries, but {heads} that latents are widened for"),
        (min(rope, nope, sizes.value) < 1, f"queries of {q.shape[2]}, a cache of {cache.shape[3]}, latents of {rank}"),
        (cache.shape[1] != 1 or cache.stride(3) != 1, f"a cache {tuple(cache.shape)} of more than one head"),
    )
    for bad, message in problems:
        if bad:
            raise ValueError(f"latent_attention: {message}")
    return sizes
