"""Copies of whole KV pages on the device: copy-on-write within the arena, and to and from buffers that cross the link.

Invariants: bits are moved, whatever dtype they are of; one launch for any number of pages.
Knows nothing of layers, sequences or hosts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

register(
    "copy_pages",
    "triton",
    "stoker_kernels.pages.triton_pages:copy_pages",
    triton_supports(torch.int64, torch.uint8),
    invariant=True,
)
register("copy_pages", "reference", "stoker_kernels.pages.reference:copy_pages", reference_supports, invariant=True)


def copy_pages(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """target[pairs[i, 1]] = source[pairs[i, 0]] for every i.

    `source [P,R,W]` and `target [P',R,W]` are words (int64, or uint8 where a row is no multiple of 8 bytes) with
    W contiguous and the other strides multiples of W; `pairs [n,2]` int32, contiguous, on the same device. No page may
    be written twice, or be read and written in one call. Pages of nothing, R = 0, are as they were.
    """
    if source.shape[1] == 0:
        return
    select("copy_pages", source.device, source.dtype)(source, target, pairs)
