"""Pages that were given up are never read: NaN in them, and no page in their places of the table, change no bit.

A page is given up when it lies behind the window, and behind the block of keys that the window begins in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.kernels.attention.batches import AttentionBatch, Shape, give_up, random_batch

from stoker_kernels.attention import choose, fixed, plan_attention

# Triton's interpreter turns loop bounds that it loaded, arrays of one element, into integers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

FP8, HALF, FULL = torch.float8_e4m3fn, torch.float16, torch.float32
DECODES = [(1, 500), (1, 0), (1, 40), (1, 129), (1, 321)]
ROWS = [*DECODES, (7, 7), (0, 0), (20, 270), (9, 390)]
Attention = Callable[..., torch.Tensor]


def attended(attention: Attention, batch: AttentionBatch, window: int, planned: int | None = None) -> torch.Tensor:
    """The result; `planned`: beforehand, for layers of which this window is the widest (0: some see everything)."""
    meta = batch.meta
    if planned is not None:
        _, heads, _, dim = batch.k.shape
        meta = plan_attention(
            meta, num_tokens=len(batch.q), num_kv_heads=heads, head_dim=dim, kv_dtype=batch.k.dtype, window=planned
        )
    return attention(batch.q, batch.k, batch.v, meta, window=window, **batch.options)


def check(attention: Attention, shape: Shape, window: int, device: torch.device, planned: int | None = None) -> None:
    batch = random_batch(shape, ROWS, decodes=len(DECODES), padding=3, seed=window, device=device)
    want = attended(attention, batch, window, planned)
    got = attended(attention, give_up(batch, window), window, planned)
    assert not got.isnan().any()
    assert torch.equal(got, want)


@pytest.mark.matrix("shape")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        (Shape(16, 2, 6, 64, FULL, FULL), 33),
        (Shape(64, 1, 2, 64, FULL, FULL), 1),
        (Shape(32, 1, 4, 80, HALF, HALF), 100),
        (Shape(128, 1, 3, 128, HALF, HALF), 65),
        (Shape(16, 1, 7, 64, FP8, HALF), 71),
    ],
    ids=str,
)
def test_triton(shape: Shape, window: int, planned: bool, device: torch.device) -> None:
    check(choose.paged_attention, shape, window, device, window if planned else None)


def test_triton_by_a_plan_of_layers_that_see_everything(device: torch.device) -> None:
    check(choose.paged_attention, Shape(64, 2, 6, 64, FULL, FULL), 70, device, 0)


@pytest.mark.parametrize("planned", [False, True])
def test_batch_invariant(planned: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "SPLIT", 64)
    window = 90
    batch = random_batch(Shape(16, 1, 2, 64, FULL, FULL), ROWS, decodes=len(DECODES), device=device)
    results = []
    for each in (batch, give_up(batch, window)):
        if planned:
            each = replace(each, meta=fixed.plan_attention(each.meta, num_kv_heads=1, window=window))
        results.append(attended(fixed.paged_attention, each, window))
    assert not results[1].isnan().any()
    assert torch.equal(*results)
