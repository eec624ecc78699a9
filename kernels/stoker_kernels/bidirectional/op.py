"""Attention of an encoder: every token of a sequence sees every other, or those near it, and no cache is involved.

Invariants: sequences lie end to end in one ragged batch, so nothing is padded and no sequence sees another's tokens;
a sequence's tiles begin with its first token, so its bits are the same in every batch.
Lengths stay on the device; the launch follows from the numbers of tokens and sequences alone.
Knows nothing of positions, of masks within a sequence, or of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

_supports = triton_supports(torch.bfloat16, torch.float16, torch.float32)


register(
    "bidirectional_attention",
    "triton",
    "stoker_kernels.bidirectional.triton_bidirectional:bidirectional_attention",
    _supports,
    invariant=True,
)
register(
    "bidirectional_attention",
    "reference",
    "stoker_kernels.bidirectional.reference:bidirectional_attention",
    reference_supports,
    invariant=True,
)


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`softmax(q·kᵀ·scale)·v` within each sequence: `q`, `k`, `v` `[T, H, D]` → `[T, H, D]`.

    Sequence i is tokens `[starts[i], starts[i + 1])`; `starts [S + 1]` int32 begins with 0, ends with T and increases.
    `window`: a token sees those at most so far from it, on either side; None: all.
    The inputs may be slices of one projection: heads are contiguous in a token, tokens may be strided.
    Raises KernelUnavailable, and on a GPU ValueError for layouts that its kernel does not read.
    """
    o: Tensor = select("bidirectional_attention", q.device, q.dtype)(
        q, k, v, starts, scale=scale, window=window, out=out
    )
    return o
