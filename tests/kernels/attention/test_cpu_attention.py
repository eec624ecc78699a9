"""Attention on a CPU against the reference: any shape, pages and slots in any order."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.rounding import close

from stoker_kernels.attention import AttentionMeta, attention_workspace
from stoker_kernels.attention.compiled_attention import paged_attention as compiled_attention
from stoker_kernels.attention.cpu_attention import paged_attention
from stoker_kernels.attention.reference import reference_attention
from stoker_kernels.launch import cc

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
LAX = settings(deadline=None, max_examples=60)


@LAX
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    draw = data.draw
    dim, kv_heads, group = draw(st.sampled_from([8, 40, 64, 96])), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    page, dtype = draw(st.sampled_from([2, 16])), draw(DTYPES)
    decodes = draw(st.lists(st.integers(0, 150), max_size=6))
    chunks = [
        (draw(st.integers(1, length)), length) for length in draw(st.lists(st.integers(1, 40), max_size=3))
    ]
    lengths = [*decodes, *(length for _, length in chunks)]
    if not lengths:
        return
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    counts = [*(1 for _ in decodes), *(count for count, _ in chunks)]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    pages = sum(-(-length // page) for length in lengths) + 1
    shuffled = iter(torch.randperm(pages, generator=generator).tolist())
    table = torch.full((len(lengths) + 2, 80), 10**6, dtype=torch.int32)
    slots = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].to(torch.int32)
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        used = -(-length // page)
        table[slot, :used] = torch.tensor([next(shuffled) for _ in range(used)], dtype=torch.int32)
    padding = draw(st.integers(0, 2))
    q = torch.randn(int(starts[-1]) + padding, group * kv_heads, dim, generator=generator).to(dtype)
    caches = [torch.randn(pages, kv_heads, page, dim, generator=generator).to(dtype) for _ in range(2)]
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        if length % page:  # what lies behind a text may be anything
            for cache in caches:
                cache[int(table[slot, length // page]), :, length % page :] = float("nan")
    meta = AttentionMeta(
        table, slots, starts, torch.tensor(lengths, dtype=torch.int32), len(decodes), max(counts), 150,
        attention_workspace(8, group * kv_heads, dim, "cpu"),
    )  # fmt: skip
    window = draw(st.sampled_from([0, 1, 7, 500]))
    expected = reference_attention(q, *caches, meta, scale=dim**-0.5, window=window)
    close(paged_attention(q, *caches, meta, scale=dim**-0.5, window=window), expected, parts=8)
    if cc.refusal("cpu_attention") is None:
        close(compiled_attention(q, *caches, meta, scale=dim**-0.5, window=window), expected, parts=8)
