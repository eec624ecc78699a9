"""Attention of the tokens of images: `image_attention(q, k_cache, v_cache, page_table, spans, ..., out=out)`.

It goes over what causal attention has written: the rows of images alone are computed anew, with the keys of all of
their image in sight. It costs a second pass over those rows, and leaves the kernels of all other tokens as they are.
Invariants: the step's own keys and values are in the cache before the op runs. Rows that are no image's, and keys that
no row of a tile sees, are not touched. Nothing is read back to the host on a GPU.
Knows nothing of the page allocator, of what an image shows, or of other attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.attention import rows_support
from stoker_kernels.image_attention.types import ImageSpans
from stoker_kernels.launch.dispatch import (
    reference_supports,
    register,
    register_invariant,
    select,
    triton_supports,
)

_supports = triton_supports(torch.bfloat16, torch.float16, torch.float32)

# A row's sums are of blocks of keys at fixed places, whatever else is in the step.
register(
    "image_attention", "triton", "stoker_kernels.image_attention.launch:image_attention", _supports, invariant=True
)
register("image_attention", "reference", "stoker_kernels.image_attention.reference:image_attention", reference_supports)
register_invariant("image_attention", "rows", "stoker_kernels.image_attention.rows:image_attention", rows_support)


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
    """Attention of the rows of `q [T, Hq, D]` that `spans` names, over the pages `[P, Hkv, B, D]`, into those of `out`.

    A row at place p of the image [begin, end) sees the keys j < end, and with `window` > 0 of these the ones that
    p − j < window or j ≥ begin hold for. Its logit is `q·k·scale`, then `softcap·tanh(logit/softcap)` if softcap > 0.
    `page_table [slots, max_pages]` int32; `k_scale`, `v_scale` `[Hkv]` fp32 multiply an e4m3 cache. Raises
    KernelUnavailable, and on a GPU ValueError for layouts that its kernel does not read.
    """
    o: Tensor = select("image_attention", q.device, q.dtype)(
        q,
        k_cache,
        v_cache,
        page_table,
        spans,
        scale=scale,
        window=window,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
    )
    return o
