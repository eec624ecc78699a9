"""Attention with a shared prefix against plain attention: odd sizes, poisoned caches, steps that share nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.kernels.attention.batches import NO_PAGE, AttentionBatch, Shape, random_batch

from stoker_kernels.attention import (
    PrefixSizes,
    PrefixSpace,
    attention_workspace,
    cut_prefix,
    plan_attention,
    prefix_space,
    shared_prefix_attention,
)
from stoker_kernels.attention.inputs import inputs_of
from stoker_kernels.attention.reference import reference_attention

# Triton's interpreter turns loop bounds that it loaded, arrays of one element, into integers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

FP8, HALF, FULL = torch.float8_e4m3fn, torch.float16, torch.float32
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def sharing(shape: Shape, pages: int, own: list[int], device: torch.device, seed: int = 0) -> AttentionBatch:
    """Rows of `pages` shared pages and `own` keys each; of 0 own keys: padding, without a slot."""
    lengths = [pages * shape.page + keys if keys else 0 for keys in own]
    batch = random_batch(shape, [(1, keys) for keys in lengths], decodes=len(own), seed=seed, device=device)
    table, slots = batch.meta.page_table.clone(), batch.meta.seq_slots.clone()
    first = next(row for row, keys in enumerate(own) if keys)
    assert first == 0, "the first row of a step is no padding"
    for row, keys in enumerate(own):
        if keys:
            table[slots[row], :pages] = table[slots[0], :pages]
        else:
            slots[row] = -1
    return replace(batch, meta=replace(batch.meta, page_table=table, seq_slots=slots))


def space_of(batch: AttentionBatch, keys: int, max_rows: int) -> PrefixSpace:
    """Room for up to `max_rows` rows; what a step has to write holds pages that there are not."""
    _, kv_heads, page, dim = batch.k.shape
    sizes = PrefixSizes(
        max_rows, batch.meta.page_table.shape[1], page, batch.q.shape[1], kv_heads, dim, batch.k.element_size()
    )
    space = prefix_space(sizes, batch.q.device)
    assert sum(each.nbytes for each in (space.keys, space.table, space.lens, space.rows, space.values, space.lse)) == (
        sizes.nbytes
    )
    space.keys.fill_(keys)
    space.table.fill_(NO_PAGE)
    space.lens.fill_(-7)
    space.values.fill_(float("nan"))
    space.lse.fill_(float("nan"))
    return space


def check(batch: AttentionBatch, keys: int, *, planned: bool = False, extra_rows: int = 0) -> torch.Tensor:
    """The op's result, after its comparison with plain attention over the whole page table in fp32."""
    _, kv_heads, _, dim = batch.k.shape
    meta = cut_prefix(batch.meta, space_of(batch, keys, len(batch.rows) + extra_rows))
    if planned:
        meta = plan_attention(
            meta, num_tokens=len(batch.q), num_kv_heads=kv_heads, head_dim=dim, kv_dtype=batch.k.dtype
        )
    out = torch.full_like(batch.q, float("nan"))
    shared_prefix_attention(batch.q, batch.k, batch.v, meta, out=out, **batch.options)
    want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options)
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(out.float(), want, atol=tolerance, rtol=tolerance)
    assert not meta.workspace.arrivals.any()
    return out


@pytest.mark.matrix(take=3)
@pytest.mark.parametrize(
    ("shape", "pages", "own"),
    [
        (Shape(16, 2, 6, 64, HALF, HALF), 9, [1, 40, 0, 200, 7]),
        (Shape(64, 1, 7, 128, HALF, HALF), 2, [1, 1, 1]),
        (Shape(16, 1, 5, 80, HALF, HALF), 13, [33, 0, 1]),
        (Shape(64, 2, 22, 64, HALF, HALF), 3, [70, 1]),
        (Shape(128, 1, 3, 256, HALF, HALF), 1, [129, 5, 2]),
        (Shape(32, 2, 2, 96, FULL, FULL), 5, [1, 64, 65]),
        (Shape(16, 2, 6, 64, FP8, HALF), 11, [300, 1, 0, 16]),
        (Shape(64, 1, 7, 128, FP8, HALF), 2, [1, 90]),
        (Shape(32, 1, 3, 80, FP8, HALF), 7, [2, 31, 100]),
        (Shape(64, 1, 28, 64, FP8, HALF), 2, [9, 9, 9, 9, 9, 9, 9, 9, 9, 9]),
    ],
    ids=str,
)
def test_rows_that_share_pages_match(shape: Shape, pages: int, own: list[int], device: torch.device) -> None:
    check(sharing(shape, pages, own, device), pages * shape.page, planned=True, extra_rows=3)


def test_random_shapes_match(device: torch.device) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(4):
        cache = rng.choice([HALF, FP8])
        kv_heads, group, dim = rng.choice([1, 2, 3]), rng.randrange(1, 12), rng.choice([48, 64, 72, 128])
        shape = Shape(rng.choice([16, 32, 64, 128]), kv_heads, kv_heads * group, dim, cache, HALF)
        pages = rng.randrange(1, 600 // shape.page + 2)
        own = [rng.randrange(1, 150), *(rng.choice([0, 1, rng.randrange(1, 300)]) for _ in range(rng.randrange(1, 9)))]
        print(shape, pages, own)
        check(sharing(shape, pages, own, device, seed), pages * shape.page, planned=rng.random() < 0.5)


def test_many_rows_take_wide_tiles(device: torch.device) -> None:
    """More queries than a narrow tile holds, the last tile filled in part."""
    rng = random.Random(3)
    own = [rng.randrange(1, 90) for _ in range(67)]
    check(sharing(Shape(64, 1, 5, 64, HALF, HALF), 5, own, device), 320, planned=True)


@pytest.mark.matrix(take=1)
@pytest.mark.parametrize("cache", [HALF, FP8], ids=["f16", "e4m3"])
def test_fewer_keys_than_the_rows_share_are_right_too(cache: torch.dtype, device: torch.device) -> None:
    """0 among them: a graph is replayed for any number."""
    batch = sharing(Shape(32, 2, 6, 64, cache, HALF), 6, [5, 0, 64, 1], device)
    for pages in (0, 1, 5, 6):
        check(batch, pages * 32)


def test_padding_alone_reads_no_page(device: torch.device) -> None:
    batch = sharing(Shape(16, 1, 3, 64, HALF, HALF), 4, [9, 2], device)
    slots, lens = torch.full_like(batch.meta.seq_slots, -1), torch.zeros_like(batch.meta.seq_lens)
    batch = replace(batch, meta=replace(batch.meta, seq_slots=slots, seq_lens=lens))
    out = torch.full_like(batch.q, float("nan"))
    meta = cut_prefix(batch.meta, space_of(batch, 0, 2))
    shared_prefix_attention(batch.q, batch.k, batch.v, meta, out=out, **batch.options)
    assert not out.any()


def test_a_row_s_bits_do_not_depend_on_a_plan(device: torch.device) -> None:
    batch = sharing(Shape(64, 2, 8, 64, HALF, HALF), 3, [500, 1, 20], device)
    assert torch.equal(check(batch, 192), check(batch, 192, planned=True))


def test_queries_of_padding_may_be_anything(device: torch.device) -> None:
    batch = sharing(Shape(16, 2, 6, 64, HALF, HALF), 5, [3, 0, 50], device)
    batch.q[1] = float("nan")
    out = torch.full_like(batch.q, float("nan"))
    meta = cut_prefix(batch.meta, space_of(batch, 80, 3))
    shared_prefix_attention(batch.q, batch.k, batch.v, meta, out=out, **batch.options)
    assert torch.isfinite(out).all()
    assert not out[1].any()


def test_what_shares_nothing_is_refused(device: torch.device) -> None:
    batch = sharing(Shape(16, 2, 6, 64, HALF, HALF), 2, [3, 5], device)
    with pytest.raises(ValueError, match="no shared prefix; cut_prefix"):
        shared_prefix_attention(batch.q, batch.k, batch.v, batch.meta, **batch.options)
    with pytest.raises(ValueError, match="up to 1 decode rows; this step has 2"):
        cut_prefix(batch.meta, space_of(batch, 32, 1))
    chunked = random_batch(Shape(16, 2, 6, 64, HALF, HALF), [(1, 40), (3, 9)], decodes=1, device=device)
    with pytest.raises(ValueError, match="this step has 1, of 2 rows"):
        cut_prefix(chunked.meta, space_of(chunked, 16, 2))


def test_sharing_needs_plain_causal_attention(device: torch.device) -> None:
    batch = sharing(Shape(16, 2, 6, 64, HALF, HALF), 2, [3, 5], device)
    meta = cut_prefix(batch.meta, space_of(batch, 32, 2))
    assert meta.shared is not None
    results = meta.shared.results
    with pytest.raises(ValueError, match="go with no window"):
        inputs_of(batch.q, batch.k, batch.v, meta, window=20, before=results, **batch.options)
    other = replace(meta, workspace=attention_workspace(2, 6, 64, device))
    with pytest.raises(ValueError, match="results of keys before are"):
        inputs_of(batch.q, batch.k, batch.v, other, before=replace(results, lse=results.lse[:1]), **batch.options)
