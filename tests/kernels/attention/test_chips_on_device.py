"""Attention in the tiles of every kind of GPU against its reference: they are chosen by capability, and need not be
run on the one they are for.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.attention.batches import Shape, random_batch

from stoker_kernels.attention import choose, paged_attention, triton_launch
from stoker_kernels.attention.reference import reference_attention

HALF, FP8 = torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize(("sm", "dim"), [(75, 96), (75, 256), (80, 208), (86, 128), (89, 256), (120, 80)])
def test_the_tiles_of_each_chip_match(sm: int, dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choose, triton_launch):
        monkeypatch.setattr(module, "sm_of", lambda _: sm)
    pick = random.Random(sm * 1000 + dim)
    heads = pick.choice([1, 2])
    shape = Shape(pick.choice([16, 64]), heads, heads * pick.randint(1, 7), dim, pick.choice([HALF, FP8]), HALF)
    decodes = [(1, pick.randint(1, 200)), (1, 0)]
    rows = [*decodes, (pick.randint(2, 30), pick.randint(30, 100)), (0, 0)]
    batch = random_batch(shape, rows, decodes=len(decodes), padding=2, seed=sm, device=device)
    out = torch.full_like(batch.q, float("nan"))
    paged_attention(batch.q, batch.k, batch.v, batch.meta, out=out, **batch.options)
    want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options)
    torch.testing.assert_close(out.float(), want, atol=2e-3, rtol=2e-3)
