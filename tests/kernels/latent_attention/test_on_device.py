"""The latent kernels against their reference: odd sizes and lengths, poisoned pages, one tile and many."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from tests.kernels.latent_attention.latent_batches import LatentBatch, Shape, random_batch

from stoker_kernels.latent_attention import latent_attention, latent_rope_write, plan_latent_attention, reference
from stoker_kernels.latent_attention.triton_launch import plan
from stoker_kernels.launch.dispatch import KernelUnavailable, pin, select, unpin
from stoker_kernels.launch.pdl import enable_pdl

HALF, FULL = torch.float16, torch.float32
DECODES = [(1, 300), (1, 0), (1, 1), (1, 130)]
MIXED = [*DECODES, (7, 7), (0, 0), (34, 60), (1, 9)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def pinned() -> Iterator[Callable[[str], None]]:
    """Pins an implementation for one test; skips it where that does not run."""

    def choose(name: str) -> None:
        pin("latent_attention", name)
        try:
            select("latent_attention", torch.device("cuda"), torch.bfloat16)
        except KernelUnavailable as unavailable:
            pytest.skip(str(unavailable))

    yield choose
    unpin("latent_attention")


def check(batch: LatentBatch, planned: bool = False) -> torch.Tensor:
    """The kernels' result, after its comparison with the reference in fp32."""
    meta, scale = batch.meta, batch.q.shape[2] ** -0.5
    if planned:
        heads, _, rank = batch.kv_b.shape
        if batch.q.is_cuda:
            meta = plan_latent_attention(meta, heads=heads, rank=rank, dtype=batch.q.dtype, kv_dtype=batch.cache.dtype)
        else:
            meta = plan(meta, heads, rank, batch.q.itemsize)
    kept = batch.cache_scale
    out = latent_attention(batch.q, batch.own, batch.cache, batch.kv_b, meta, scale=scale, cache_scale=kept)
    cache = batch.cache.float() if kept is None else batch.cache
    want = reference.latent_attention(
        batch.q.float(), batch.own.float(), cache, batch.kv_b.float(), batch.meta, scale=scale, cache_scale=kept
    )
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(out.float(), want, atol=tolerance, rtol=tolerance)
    assert not meta.workspace.arrivals.any()
    return out


@pytest.mark.parametrize(
    "shape",
    [
        Shape(3, 20, 6, 9, 36),
        Shape(16, 32, 16, 32, 64, page=64, dtype=HALF),
        Shape(5, 20, 6, 9, 36, cache_scale=0.37),
        Shape(3, 16, 8, 16, 32, page=32, dtype=HALF, cache_scale=0.02),
    ],
    ids=str,
)
def test_a_mixed_step_matches(shape: Shape, device: torch.device) -> None:
    check(random_batch(shape, MIXED, decodes=len(DECODES), padding=5, device=device))


def test_more_heads_than_a_tile_holds_match(device: torch.device) -> None:
    rows = [(1, 130), (1, 3), (2, 20)]
    check(random_batch(Shape(37, 12, 8, 24, 48, page=32, dtype=HALF), rows, decodes=2, device=device))


@pytest.mark.parametrize("rows", [[(1, 0)], [(3, 100), (0, 0)], [(0, 0), (0, 0)]], ids=str)
def test_steps_of_one_kind_match(rows: list[tuple[int, int]], device: torch.device) -> None:
    decodes = len(rows) if all(count == 1 for count, _ in rows) else 0
    check(random_batch(Shape(5, 16, 8, 16, 32), rows, decodes=decodes, padding=3, device=device))


def test_a_plan_made_beforehand_changes_no_bit(device: torch.device) -> None:
    batch = random_batch(Shape(5, 16, 8, 16, 32), DECODES, decodes=len(DECODES), device=device)
    assert torch.equal(check(batch), check(batch, planned=True))


def test_a_cache_of_another_type_is_refused(device: torch.device) -> None:
    batch = random_batch(Shape(5, 16, 8, 16, 32), DECODES, decodes=len(DECODES), device=device)
    with pytest.raises(ValueError, match=r"q is torch\.float32, the cache torch\.float16"):
        latent_attention(batch.q, batch.own, batch.cache.half(), batch.kv_b, batch.meta, scale=1.0)
    with pytest.raises(ValueError, match="an e4m3 cache of latents needs cache_scale, and no other takes it"):
        latent_attention(batch.q, batch.own, batch.cache.to(torch.float8_e4m3fn), batch.kv_b, batch.meta, scale=1.0)
    with pytest.raises(ValueError, match="5 heads of queries, but 4"):
        latent_attention(batch.q, batch.own, batch.cache, batch.kv_b[:4], batch.meta, scale=1.0)


@pytest.mark.parametrize(
    ("dtype", "interleaved", "cache_scale"),
    [
        (FULL, False, 0.0), (FULL, True, 0.0), (HALF, False, 0.0), (HALF, True, 0.0), (FULL, True, 0.013),
        (HALF, False, 1.7),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_written_is_what_the_reference_writes(
    dtype: torch.dtype, interleaved: bool, cache_scale: float, device: torch.device
) -> None:
    heads, nope, rope, rank, page, tokens = 3, 20, 12, 44, 16, 11
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    # Queries and latents lie side by side, as one projection gives them.
    projected = draw(tokens, heads * (nope + rope) + rank + rope)
    table = torch.randn(64, rope, generator=generator).to(device)
    positions = torch.randint(0, 64, (tokens,), generator=generator, dtype=torch.int32).to(device)
    slots = torch.randperm(5 * page, generator=generator)[:tokens].to(device)
    slots[4] = -1
    norm = draw(rank)
    found = []
    for write in (latent_rope_write, reference.latent_rope_write):
        mine = projected.clone()
        q = mine[:, : heads * (nope + rope)].unflatten(1, (heads, nope + rope))
        cache = torch.full((5, 1, page, rank + rope), 7.0, device=device)
        cache = cache.to(torch.float8_e4m3fn if cache_scale else dtype)
        own = write(
            q, mine[:, heads * (nope + rope) :], positions, slots, table, cache,
            norm=norm, eps=1e-6, interleaved=interleaved,
            cache_scale=torch.tensor([cache_scale], device=device) if cache_scale else None,
        )  # fmt: skip
        found.append((q, own, cache.float()))
        if cache_scale:
            # What stands beside is what the pages' numbers mean.
            page_of, at = slots[slots >= 0] // page, slots[slots >= 0] % page
            kept = (cache[page_of, 0, at].float() * cache_scale).to(dtype)
            assert torch.equal(own[slots >= 0], kept)
            assert kept.unique().numel() < 240
    tolerance = {"atol": 2e-6, "rtol": 2e-6} if dtype is FULL else {"atol": 2e-3, "rtol": 2e-3}
    for ours, wanted in zip(*found, strict=True):
        if cache_scale and ours.shape[-1] == rank + rope:
            # A value on the edge between two e4m3 numbers may fall either way.
            assert (ours != wanted).float().mean() < 0.01
            tolerance = {"atol": 2.0**-9, "rtol": 0.13}
        torch.testing.assert_close(ours, wanted, **tolerance)


# Heads, parts and ranks of DeepSeek V3, V2-Lite, MiniCPM 3 and GLM-4.7-Flash.
REAL = [Shape(*sizes, page=64, dtype=torch.bfloat16) for sizes in
        ((128, 128, 64, 128, 512), (16, 128, 64, 128, 512), (40, 64, 32, 64, 256),
         (20, 192, 64, 256, 512))]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["sm90", "triton"])
@pytest.mark.parametrize(
    "shape", [*REAL, replace(REAL[1], page=16), *(replace(each, cache_scale=0.02) for each in REAL)], ids=str
)
def test_real_shapes_match(shape: Shape, kernel: str, device: torch.device, pinned: Callable[[str], None]) -> None:
    pinned(kernel)
    rows = [(1, n) for n in (1, 0, 63, 64, 65, 1000, 4097, 129)] + [(1, 1), (130, 130), (200, 777), (0, 0), (17, 2049)]
    batch = random_batch(shape, rows, decodes=8, padding=9, device=device)
    plain = check(batch)
    enable_pdl(True)
    try:
        assert torch.equal(check(batch, planned=True), plain)
    finally:
        enable_pdl(False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "page", "cache_scale"),
    [(17, 64, 0.0), (20, 8, 0.0), (77, 128, 0.0), (128, 64, 0.0), (15, 64, 0.3), (23, 8, 0.02), (128, 32, 0.011)],
)
def test_the_hopper_kernel_matches_at_any_cut(
    heads: int, page: int, cache_scale: float, device: torch.device, pinned: Callable[[str], None]
) -> None:
    """Rows whole, in pieces and in a line, bit for bit from launch to launch."""
    pinned("sm90")
    draw = random.Random(heads * page)
    for count, most in ((1, 9000), (3, 3000), (40, 2000), (150, 700), (300, 120)):
        rows = [(1, draw.randrange(most)) for _ in range(count)]
        shape = Shape(heads, 128, 64, 128, 512, page=page, dtype=torch.bfloat16, cache_scale=cache_scale)
        batch = random_batch(shape, rows, decodes=count, seed=draw.randrange(100), device=device)
        first = check(batch, planned=True)
        assert torch.equal(check(batch), first)


@pytest.mark.gpu
def test_a_captured_step_serves_other_lengths(device: torch.device) -> None:
    """The launches of a mixed step, replayed over rows whose lengths have changed since."""
    shape, scale = REAL[1], 192**-0.5
    rows = [(1, n) for n in (500, 3, 70)] + [(40, 90), (30, 30)]
    batch = random_batch(shape, rows, decodes=3, padding=10, device=device)

    def step() -> torch.Tensor:
        meta = plan_latent_attention(batch.meta, heads=shape.heads, rank=shape.rank, dtype=shape.dtype)
        return latent_attention(batch.q, batch.own, batch.cache, batch.kv_b, meta, scale=scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    batch.meta.seq_lens.copy_(torch.tensor([120, 0, 64, 80, 30], dtype=torch.int32))
    graph.replay()
    # The first chunk's own latents are no longer those of its pages, so only decodes and the second are compared.
    wide = (each.float() for each in (batch.q, batch.own, batch.cache, batch.kv_b))
    want = reference.latent_attention(*wide, batch.meta, scale=scale)
    for tokens in (slice(0, 3), slice(43, 83)):
        torch.testing.assert_close(out[tokens].float(), want[tokens], atol=2e-2, rtol=2e-2)
