"""Attention of images in PyTorch: the oracle of the kernel's tests, and the CPU backend.

Invariants: all arithmetic is fp32, whatever the inputs; the result is rounded once, to the type of `out`. Keys that no
row of an image sees are not read, so they may be anything, NaN included, in pages that the table does not name.
Knows nothing of graphs: it reads spans on the host, which synchronises a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.image_attention.types import ImageSpans

# Logits held at once, in elements: bounds the reference's memory at a few times 64 MiB.
MAX_LOGITS = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Image:
    """One image on the host: its rows of `q`, the place of the first of them, and the image's places `[begin, end)`."""

    slot: int
    rows: slice
    place: int
    begin: int
    end: int

    def first_key(self, place: int, window: int) -> int:
        """The first key that a row at `place` sees: it and all behind it, up to the end, are in sight."""
        return max(min(self.begin, place - window + 1), 0) if window > 0 else 0


def images_of(spans: ImageSpans) -> Iterator[Image]:
    """The images that have rows in the step."""
    fields = (spans.slots, spans.rows, spans.counts, spans.begins, spans.ends)
    for slot, row, count, begin, end in zip(*(field.tolist() for field in fields), strict=True):
        if count > 0:
            yield Image(slot, slice(row, row + count), end - count, begin, end)


def gather(cache: Tensor, head_scale: Tensor | None, pages: Tensor, first: int, end: int) -> Tensor:
    """Keys or values `[first, end)` of one line of the page table, in fp32: `[Hkv, end − first, D]`."""
    size = cache.shape[2]
    skipped = first // size
    taken = cache[pages[skipped : (end + size - 1) // size].long()].float()
    taken = taken.transpose(0, 1).flatten(1, 2)[:, first - skipped * size : end - skipped * size]
    return taken if head_scale is None else taken * head_scale.float().view(-1, 1, 1)


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
    """`stoker_kernels.image_attention.op.image_attention` on any device; shapes as there."""
    for image in images_of(spans):
        first = image.first_key(image.place, window)
        k = gather(k_cache, k_scale, page_table[image.slot], first, image.end)
        v = gather(v_cache, v_scale, page_table[image.slot], first, image.end)
        at_once = max(1, MAX_LOGITS // (q.shape[1] * k.shape[1]))
        for begin in range(image.rows.start, image.rows.stop, at_once):
            rows = slice(begin, min(begin + at_once, image.rows.stop))
            place = image.place + begin - image.rows.start
            firsts = [image.first_key(place + row, window) - first for row in range(rows.stop - begin)]
            out[rows] = _attend(q[rows], k, v, firsts, scale, softcap).to(out.dtype)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, firsts: list[int], scale: float, softcap: float) -> Tensor:
    """Rows `q [n, Hq, D]` over keys `[Hkv, L, D]`, each from its own first one on."""
    (heads, keys, dim), tokens = k.shape, q.shape[0]
    grouped = q.float().view(tokens, heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    logits = torch.matmul(grouped, k[:, None].transpose(-1, -2)) * scale
    if softcap > 0:
        logits = torch.tanh(logits / softcap) * softcap
    hidden = torch.arange(keys, device=q.device) < torch.tensor(firsts, device=q.device)[:, None]
    weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.matmul(weights, v[:, None]).permute(2, 0, 1, 3).reshape(tokens, -1, dim)
