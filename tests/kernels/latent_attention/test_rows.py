"""Batch-invariant latent attention on a CPU: a token's bits are the same decoded, in a chunk, and among any others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.latent_attention.latent_batches import Shape, random_batch

from stoker_kernels.latent_attention import reference, rows


@pytest.mark.parametrize(("dtype", "cache_scale"), [(torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.3)])
def test_it_is_attention(dtype: torch.dtype, cache_scale: float) -> None:
    shape = Shape(3, 20, 6, 9, 36, dtype=dtype, cache_scale=cache_scale)
    batch = random_batch(shape, [(1, 70), (1, 0), (1, 1), (7, 7), (0, 0), (34, 60)], decodes=3, padding=4)
    kept = batch.cache_scale
    got = rows.latent_attention(batch.q, batch.own, batch.cache, batch.kv_b, batch.meta, scale=0.2, cache_scale=kept)
    # What the cache stands for, in fp32, and no scale.
    cache = batch.cache.float() * (1.0 if kept is None else kept)
    wide = (each.float() for each in (batch.q, batch.own, cache, batch.kv_b))
    want = reference.latent_attention(*wide, batch.meta, scale=0.2)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


def test_a_token_is_the_same_in_any_step() -> None:
    batch = random_batch(Shape(4, 24, 8, 16, 40), [(30, 50), (1, 33)], decodes=0)
    whole = rows.latent_attention(batch.q, batch.own, batch.cache, batch.kv_b, batch.meta, scale=0.3)
    meta = batch.meta
    for token in (0, 11, 29):
        # The same token as a row that decodes: the last of what its sequence had then.
        alone = replace(
            meta,
            seq_lens=torch.tensor([20 + token + 1], dtype=torch.int32),
            seq_slots=meta.seq_slots[:1],
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            num_decodes=1,
        )
        part = slice(token, token + 1)
        got = rows.latent_attention(batch.q[part], batch.own[part], batch.cache, batch.kv_b, alone, scale=0.3)
        assert torch.equal(got[0], whole[token]), token
    chunk = replace(
        meta,
        seq_lens=torch.tensor([45], dtype=torch.int32),
        seq_slots=meta.seq_slots[:1],
        query_start=torch.tensor([0, 9], dtype=torch.int32),
    )
    got = rows.latent_attention(batch.q[16:25], batch.own[16:25], batch.cache, batch.kv_b, chunk, scale=0.3)
    assert torch.equal(got, whole[16:25])


@pytest.mark.parametrize("interleaved", [True, False])
def test_what_is_cached_does_not_depend_on_other_tokens(interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    q, latents = torch.randn(9, 3, 18, generator=generator), torch.randn(9, 26, generator=generator)
    norm, table = torch.rand(20, generator=generator) + 0.5, torch.randn(64, 6, generator=generator)
    positions = torch.randint(0, 64, (9,), generator=generator, dtype=torch.int32)
    mapping = torch.tensor([3, -1, 17, 5, 30, 31, -1, 0, 8])

    def write(part: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cache, turned = torch.zeros(2, 1, 16, 26), q[part].clone()
        own = rows.latent_rope_write(
            turned, latents[part], positions[part], mapping[part], table, cache, norm=norm, eps=1e-6,
            interleaved=interleaved,
        )  # fmt: skip
        return turned, own, cache

    turned, own, cache = write(slice(0, 9))
    expected, page = q.clone(), torch.zeros(2, 1, 16, 26)
    want = reference.latent_rope_write(
        expected, latents, positions, mapping, table, page, norm=norm, eps=1e-6, interleaved=interleaved
    )
    torch.testing.assert_close((turned, own, cache), (expected, want, page))
    for first, last in ((0, 1), (8, 9), (2, 7)):
        part = write(slice(first, last))
        assert torch.equal(part[0], turned[first:last])
        assert torch.equal(part[1], own[first:last])
