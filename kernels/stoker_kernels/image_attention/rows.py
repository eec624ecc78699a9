"""Attention of images on a CPU where a token's bits do not depend on the batch: each row by itself.

Invariants: sums as of `attention.rows_attended`, fp32 in one order, over the keys that the row sees and no others.
Knows nothing of dispatch.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.attention import rows_attended
from stoker_kernels.image_attention.reference import gather, images_of
from stoker_kernels.image_attention.types import ImageSpans
from stoker_kernels.launch.compiled import refuse_tape


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
    """`stoker_kernels.image_attention.op.image_attention`; shapes as there."""
    refuse_tape("attention in one order")
    for image in images_of(spans):
        first = image.first_key(image.place, window)
        k = gather(k_cache, k_scale, page_table[image.slot], first, image.end)
        v = gather(v_cache, v_scale, page_table[image.slot], first, image.end)
        for row in range(image.rows.start, image.rows.stop):
            # It is the last of its keys to a kernel that is causal.
            unseen = image.first_key(image.place + row - image.rows.start, window) - first
            query = q[row : row + 1].float()
            seen = rows_attended(query, k[:, unseen:], v[:, unseen:], scale=scale, softcap=softcap)
            out[row : row + 1] = seen.to(out.dtype)
    return out
