"""Random steps with images, poisoned wherever the op must not read, and what it must write, from a dense mask.

Invariants: a cache slot that no row of an image sees holds NaN, and a page-table entry without such keys names no page.
The expected rows come from the definition of what is visible, key by key, and share no code with the op.
Knows nothing of which implementation is checked.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.image_attention import ImageSpans

NO_PAGE = 1_000_000
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """Sizes of the cache and the heads; `cache` is the dtype of the one, `query` of the queries."""

    page: int
    kv_heads: int
    group: int
    dim: int
    cache: torch.dtype = torch.float32
    query: torch.dtype = torch.float32


@dataclass(frozen=True)
class Rules:
    """What of the op is neither a tensor nor a size."""

    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class Chunk:
    """What a step computes of a sequence: tokens `[context, tokens)`, in which images `[begin, end)` lie.

    The first image may begin before the chunk.
    """

    context: int
    tokens: int
    images: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ImageStep:
    """The op's arguments, and what it must give in fp32: NaN in the rows that it leaves alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor
    spans: ImageSpans
    options: dict[str, Any]
    expected: Tensor

    def run(self, attention: Any) -> Tensor:
        """The result of an implementation, after a look that nothing else was written."""
        out = torch.full_like(self.q, 7.0)
        assert attention(self.q, self.k, self.v, self.page_table, self.spans, out=out, **self.options) is out
        others = self.expected.isnan().all(dim=-1).all(dim=-1).to(out.device)
        assert bool((out[others] == 7.0).all()), "a row that is no image's was written"
        return out

    def check(self, attention: Any, tolerance: float) -> Tensor:
        """The same, after its comparison with what is expected."""
        out = self.run(attention)
        rows = ~self.expected.isnan().all(dim=-1).all(dim=-1)
        got = out.cpu().float()[rows]
        torch.testing.assert_close(got, self.expected[rows], atol=tolerance, rtol=tolerance)
        return out


def visible(place: int, begin: int, end: int, window: int) -> list[bool]:
    """Whether the image's row at `place` sees each key of its sequence, up to `end`."""
    return [window == 0 or place - key < window or key >= begin for key in range(end)]


def draw_chunks(pick: random.Random, most: int = 60) -> list[Chunk]:
    """Sequences with an image or two of up to `most` tokens, or none, some of them begun in an earlier step."""
    chunks = []
    for _ in range(pick.randint(1, 3)):
        at = pick.choice([0, pick.randint(1, 40), pick.randint(60, 200)])
        images = []
        for _ in range(pick.randint(0, 2)):
            begin = at + pick.randint(0, 9)
            at = begin + pick.randint(1, most)
            images.append((begin, at))
        context = pick.randint(*images[0]) if images and pick.random() < 0.5 else pick.randint(0, at)
        images = [image for image in images if image[1] > context]
        if images and images[0][0] > context:
            context = pick.randint(max(0, images[0][0] - 7), images[0][0])
        chunks.append(Chunk(context, max(at, context) + pick.randint(1, 20), tuple(images)))
    if not any(chunk.images for chunk in chunks):
        chunks.append(Chunk(5, 40, ((3, 33),)))
    return chunks


def make_step(
    shape: Shape,
    chunks: list[Chunk],
    rules: Rules,
    *,
    empty: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> ImageStep:
    """A step of these chunks, with `empty` images of no rows behind the others."""
    generator = torch.Generator().manual_seed(seed)
    page, heads, dim = shape.page, shape.kv_heads, shape.dim
    counts = [-(-chunk.tokens // page) for chunk in chunks]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    lines = torch.randperm(len(chunks) + 2, generator=generator).tolist()
    table = torch.full((len(chunks) + 2, max(counts) + 1), NO_PAGE, dtype=torch.int32)
    caches = [torch.full((len(order), heads, page, dim), float("nan")) for _ in range(2)]
    scales = torch.rand(2, heads, generator=generator) + 0.5 if shape.cache is FP8 else torch.ones(2, heads)
    q = torch.randn(
        sum(chunk.tokens - chunk.context for chunk in chunks), heads * shape.group, dim, generator=generator
    )
    expected = torch.full(q.shape, float("nan"))
    fields: list[tuple[int, ...]] = []
    row = 0
    for line, chunk in zip(lines, chunks, strict=False):
        keys, values = (
            torch.randn(heads, chunk.tokens, dim, generator=generator).to(shape.cache).float() for _ in range(2)
        )
        sights = []
        for begin, end in chunk.images:
            first = max(begin, chunk.context)
            at = row + first - chunk.context
            sees = torch.tensor([visible(place, begin, end, rules.window) for place in range(first, end)])
            rows = slice(at, at + end - first)
            dense = (each[:, :end] * scale.view(-1, 1, 1) for each, scale in zip((keys, values), scales, strict=True))
            expected[rows] = attend(q[rows].to(shape.query).float(), *dense, sees, dim**-0.5, rules.softcap)
            fields.append((line, at, end - first, begin, end))
            sights.append(torch.nn.functional.pad(sees.any(0), (0, chunk.tokens - end)))
        row += chunk.tokens - chunk.context
        seen = torch.stack(sights).any(0) if sights else torch.zeros(chunk.tokens, dtype=torch.bool)
        for index in range(-(-chunk.tokens // page)):
            own, part = order.pop(), slice(index * page, min((index + 1) * page, chunk.tokens))
            if not seen[part].any():
                continue
            table[line, index] = own
            for cache, dense in zip(caches, (keys, values), strict=True):
                hidden = ~seen[part, None].expand(-1, dim)
                cache[own, :, : part.stop - part.start] = dense[:, part].masked_fill(hidden, float("nan"))
    fields += [(0, 0, 0, 0, 0)] * empty
    # A field of an upload starts anywhere.
    columns = [torch.tensor([0, *column], dtype=torch.int32).to(device)[1:] for column in zip(*fields, strict=True)]
    given = {"k_scale": scales[0].to(device), "v_scale": scales[1].to(device)} if shape.cache is FP8 else {}
    return ImageStep(
        q.to(device, shape.query),
        caches[0].to(shape.cache).to(device),
        caches[1].to(shape.cache).to(device),
        table.to(device),
        ImageSpans(*columns, most_rows=max(field[2] for field in fields)),
        {"scale": dim**-0.5, "window": rules.window, "softcap": rules.softcap, **given},
        expected,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, softcap: float) -> Tensor:
    """Rows `q [n, Hq, D]` over keys `[Hkv, L, D]`, of which `sees [n, L]` says which: head by head, by the book."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[0]
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[head // group].T * scale
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        out[:, head] = torch.softmax(logits.masked_fill(~sees, -float("inf")), dim=-1) @ v[head // group]
    return out
