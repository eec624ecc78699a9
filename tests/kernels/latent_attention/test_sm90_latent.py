"""The latent kernels of csrc/sm90_latent.cuh, run on the CPU by `emulator/`: tiles, turns, splits."""

from __future__ import annotations

import ctypes
import itertools
import random
from dataclasses import replace

import pytest
import torch
from tests.kernels.emulator.latent import absorbed_of, compile_latent, run, run_context
from tests.kernels.latent_attention.latent_batches import LatentBatch, Shape, random_batch

from stoker_kernels.latent_attention import reference, sm90_latent
from stoker_kernels.latent_attention.shapes import sizes_of
from stoker_kernels.latent_attention.sm90_latent import LOG2E, TILE_KEYS, latent_refusal

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_latent(tmp_path_factory.mktemp("emulator"))


def write_plan(batch: LatentBatch, cuts: list[list[int]], parts: list[int]) -> None:
    """Items of each row, cut at these keys, dealt `parts` items at a time."""
    space, lengths, slots = batch.meta.workspace, batch.meta.seq_lens.tolist(), batch.meta.seq_slots.tolist()
    items = []
    for row, inner in enumerate(cuts):
        first, bounds = len(items), [0, *inner, lengths[row]]
        items += [[row, slots[row], start, end, first, len(bounds) - 1]
                  for start, end in itertools.pairwise(bounds)]  # fmt: skip
        space.items[row, 6:] = torch.tensor([first, len(bounds) - 1])
    space.items[: len(items), :6] = torch.tensor(items, dtype=torch.int32)
    assert sum(parts) == len(items)
    space.shares[: len(parts) + 1, 0] = torch.tensor([0, *parts], dtype=torch.int32).cumsum(0)


def check(kernels: ctypes.CDLL, batch: LatentBatch, parts: int, seed: int = 0) -> torch.Tensor:
    scale = batch.q.shape[2] ** -0.5
    got = run(kernels, batch, scale, parts, seed)
    rows, nope = batch.meta.num_decodes, batch.q.shape[2] - 64
    # What is attended, without its way back: values are latents.
    unit = torch.eye(512).expand(batch.kv_b.shape[0], 512, 512)
    kv_b = torch.cat([batch.kv_b[:, :nope].float(), unit], dim=1)
    cache = batch.cache.float() if batch.cache_scale is None else batch.cache
    want = reference.latent_attention(batch.q.float(), batch.own.float(), cache, kv_b, batch.meta, scale=scale,
                                      cache_scale=batch.cache_scale)[:rows]  # fmt: skip
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)
    return got


def step(heads: int, page: int, lengths: list[int], seed: int = 0, cache_scale: float = 0.0) -> LatentBatch:
    shape = Shape(heads, 16, 64, 8, 512, page=page, dtype=BF16, cache_scale=cache_scale)
    return random_batch(shape, [(1, keys) for keys in lengths], decodes=len(lengths), seed=seed)


@pytest.mark.parametrize(
    ("keys", "cache_scale"),
    [(1, 0.0), (64, 0.0), (65, 0.0), (128, 0.0), (200, 0.0), (257, 0.0), (1, 0.3), (64, 1.7), (97, 0.02), (333, 0.011)],
)
def test_each_number_of_tiles_matches(kernels: ctypes.CDLL, keys: int, cache_scale: float) -> None:
    batch = step(16, 64, [keys], cache_scale=cache_scale)
    write_plan(batch, [[]], [1])
    check(kernels, batch, 1)


@pytest.mark.parametrize(
    ("heads", "page", "cache_scale"),
    [(20, 16, 0.0), (128, 32, 0.0), (5, 8, 0.0), (70, 128, 0.0), (19, 8, 0.04), (67, 16, 0.5), (3, 256, 0.009)],
)
def test_rows_in_pieces_and_in_one_match(
    kernels: ctypes.CDLL, heads: int, page: int, cache_scale: float
) -> None:
    batch = step(heads, page, [150, 0, 300, 1], seed=heads, cache_scale=cache_scale)
    write_plan(batch, [[128], [], [64, 192], []], [1, 2, 4])
    first = check(kernels, batch, 3)
    assert not first[1].any()
    assert torch.equal(check(kernels, batch, 3, seed=7), first)


def test_many_pieces_of_a_row_match(kernels: ctypes.CDLL) -> None:
    """More than the combining kernels have under way together, of few parts and of many."""
    batch = step(3, 64, [1180, 1000])
    write_plan(batch, [list(range(64, 1180, 64)), [640]], [9, 12])
    check(kernels, batch, 2)
    write_plan(batch, [list(range(64, 1180, 64)), [640]], [1] * 21)
    check(kernels, batch, 21)


def test_more_pages_than_are_at_hand_match(kernels: ctypes.CDLL) -> None:
    """A row of an e4m3 cache whose page numbers are read twice, from behind its first keys on."""
    batch = step(2, 8, [453], cache_scale=0.07)
    write_plan(batch, [[64]], [2])
    check(kernels, batch, 1)


@pytest.mark.parametrize("cache_scale", [0.0, 0.13])
def test_random_steps_match(kernels: ctypes.CDLL, cache_scale: float) -> None:
    draw = random.Random(4 if cache_scale == 0.0 else 9)
    for _ in range(3):
        lengths = [draw.randrange(400) for _ in range(3)]
        batch = step(draw.randrange(1, 100), 1 << draw.randrange(3, 8), lengths, draw.randrange(100), cache_scale)
        places = [range(TILE_KEYS, keys, TILE_KEYS) for keys in lengths]
        cuts = [sorted(draw.sample(each, draw.randrange(min(3, len(each) + 1)))) for each in places]
        items = sum(len(each) + 1 for each in cuts)
        write_plan(batch, cuts, [1, items - 1])
        check(kernels, batch, 2)


@pytest.mark.parametrize(
    ("heads", "page", "parts", "cache_scale"),
    [(16, 64, 3, 0.0), (20, 16, 1, 0.0), (90, 32, 2, 0.0), (14, 8, 2, 0.06), (71, 128, 1, 0.4)],
)
def test_the_context_of_chunks_matches(
    kernels: ctypes.CDLL, heads: int, page: int, parts: int, cache_scale: float
) -> None:
    rows = [(1, 130), (7, 7), (0, 0), (5, 150), (1, 2), (3, 67)]
    shape = Shape(heads, 16, 64, 8, 512, page=page, dtype=BF16, cache_scale=cache_scale)
    batch = random_batch(shape, rows, decodes=1, padding=4, seed=heads)
    scale, meta, at = batch.q.shape[2] ** -0.5, batch.meta, 0
    got, lse = run_context(kernels, batch, scale, parts, seed=heads)
    queries = torch.cat([absorbed_of(batch).float(), batch.q[..., 16:].float()], dim=-1)
    nothing = torch.ones(got.shape[0], dtype=torch.bool)
    for row, (count, keys) in enumerate(rows):
        if row > 0 and 0 < count < keys:
            pages = meta.page_table[meta.seq_slots[row], : -(-keys // page)].long()
            context = batch.cache[pages, 0].flatten(0, 1)[: keys - count].float() * (cache_scale or 1.0)
            logits = torch.einsum("thd,kd->thk", queries[at : at + count], context) * scale
            want = torch.softmax(logits, dim=-1) @ context[:, :512]
            torch.testing.assert_close(got[at : at + count].float(), want, atol=2e-2, rtol=2e-2)
            sums = torch.logsumexp(logits, dim=-1) * LOG2E
            torch.testing.assert_close(lse[at : at + count], sums, atol=1e-3, rtol=1e-3)
            nothing[at : at + count] = False
        at += count
    assert got[nothing].isnan().all()
    assert (lse[nothing] == -float("inf")).all()


@pytest.mark.parametrize(
    ("shape", "scale", "reason"),
    [
        (Shape(3, 16, 64, 8, 512, page=4, dtype=BF16), 0.1, "takes pages of 8 tokens and more, not 4"),
        (Shape(3, 16, 32, 8, 512, page=16, dtype=BF16), 0.1, "takes rotated parts of 64, not 32"),
        (Shape(3, 16, 64, 8, 256, page=16, dtype=BF16), 0.1, "takes latents of 512, not 256"),
        (Shape(3, 12, 64, 8, 512, page=16, dtype=BF16), 0.1, "rows do not start on multiples of 16 bytes"),
        (Shape(3, 16, 64, 8, 512, page=16, dtype=torch.float16), 0.1, "queries of bfloat16 and a cache of it or e4m3"),
        (Shape(3, 16, 64, 8, 512, page=16, dtype=BF16, cache_scale=0.1), 0.1, None),
        (Shape(3, 16, 32, 8, 512, page=16, dtype=BF16, cache_scale=0.1), 0.1, "takes rotated parts of 64, not 32"),
        (Shape(3, 16, 64, 8, 512, page=16, dtype=BF16), -0.1, "takes a positive scale, not -0.1"),
        (Shape(3, 16, 64, 8, 512, page=16, dtype=BF16), 0.1, None),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_take_is_said(shape: Shape, scale: float, reason: str | None) -> None:
    batch = random_batch(shape, [(1, 3)], decodes=1)
    found = latent_refusal(batch.q, batch.cache, sizes_of(batch.q, batch.cache, batch.kv_b), scale)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("heads", "rows", "longest", "parts"),
    [(128, 64, 4096, 66), (16, 64, 4096, 132), (130, 64, 4096, 44), (16, 3, 300, 9)],
)
def test_parts_fill_the_chip_where_there_are_as_many_pieces(
    heads: int, rows: int, longest: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm90_latent, "sm_count", lambda _: 132)
    assert sm90_latent.decode_pays(heads, rows, BF16)
    meta = step(1, 64, [1] * rows).meta
    assert sm90_latent.part_count(replace(meta, max_seq_len=longest), heads) == parts


def test_many_rows_of_few_heads_are_tritons_in_bf16_alone() -> None:
    assert not sm90_latent.decode_pays(13, 171, BF16)
    assert sm90_latent.decode_pays(13, 171, torch.float8_e4m3fn)
