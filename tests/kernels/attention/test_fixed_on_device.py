"""Batch-invariant attention: right, and the same bits for a token in every step that it may be part of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.attention.batches import AttentionBatch, Shape, random_batch

from stoker_kernels.attention import (
    AttentionMeta,
    BlockPattern,
    attention_workspace,
    fixed,
    paged_attention,
    plan_attention,
)
from stoker_kernels.attention.reference import reference_attention
from stoker_kernels.launch import dispatch

# Triton's interpreter turns loop bounds that it loaded, arrays of one element, into integers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

FP8, HALF, FULL = torch.float8_e4m3fn, torch.float16, torch.float32
DECODES = [(1, 150), (1, 0), (1, 40), (1, 1)]
MIXED = [*DECODES, (7, 7), (0, 0), (9, 75)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
KINDS = [
    (Shape(16, 1, 2, 64, FULL, FULL), {}),
    (Shape(64, 1, 7, 64, HALF, HALF), {}),
    (Shape(32, 2, 4, 48, HALF, HALF), {"window": 70}),
    (Shape(16, 1, 3, 64, FP8, HALF), {"softcap": 20.0, "sinks": True}),
    (Shape(16, 2, 4, 64, HALF, HALF), {"slopes": True}),
    (Shape(32, 2, 4, 48, HALF, HALF), {"pattern": BlockPattern(16, 2, 3, 1)}),
]


@pytest.fixture(autouse=True)
def demanded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Batch invariance, with splits so short that these few keys are several."""
    monkeypatch.setattr(fixed, "SPLIT", 64)
    dispatch.demand_invariance(True)
    yield
    dispatch.demand_invariance(False)


def options_of(shape: Shape, options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    ends = {"sinks": (-2.0, 4.0), "slopes": (0.003, 0.4)}
    given = {name: torch.linspace(*ends[name], shape.q_heads, device=device) for name in ends if options.get(name)}
    return options | given


@pytest.mark.parametrize(("shape", "options"), KINDS, ids=str)
def test_a_mixed_step_matches(shape: Shape, options: dict[str, Any], device: torch.device) -> None:
    batch = random_batch(shape, MIXED, decodes=len(DECODES), padding=5, device=device)
    options = options_of(shape, options, device)
    out = torch.full_like(batch.q, float("nan"))
    paged_attention(batch.q, batch.k, batch.v, batch.meta, out=out, **batch.options, **options)
    want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options, **options)
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(out.float(), want, atol=tolerance, rtol=tolerance)
    assert not batch.meta.workspace.arrivals.any()


@pytest.mark.matrix(take=2)
@pytest.mark.parametrize(("shape", "options"), KINDS, ids=str)
def test_a_token_has_the_same_bits_in_every_step(
    shape: Shape, options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first row is computed whole; then its tokens come again in chunks, and as decode rows, beside other rows.
    batch = random_batch(shape, [(141, 141), (3, 90), (1, 37)], decodes=0, device=device, seed=11)
    options = options_of(shape, options, device) | batch.options
    whole = paged_attention(batch.q, batch.k, batch.v, batch.meta, **options)[:141]
    rng = random.Random(str(shape))
    for cut in (True, False):
        if not cut:  # a row's splits are no items of their own
            monkeypatch.setattr(fixed, "ITEMS_PER_SM", 0)
        positions = [*sorted(rng.sample(range(141), 2)), 140]
        first, last = sorted(rng.sample(range(142), 2))
        got = run(part(batch, positions, (first, last)), planned=cut, **options)
        assert torch.equal(got[: len(positions)], whole[positions])
        assert torch.equal(got[len(positions) : len(positions) + last - first], whole[first:last])


def run(batch: AttentionBatch, *, planned: bool, **options: Any) -> torch.Tensor:
    meta, (_, heads, _, dim) = batch.meta, batch.k.shape
    if planned:
        meta = plan_attention(
            meta, num_tokens=len(batch.q), num_kv_heads=heads, head_dim=dim, kv_dtype=batch.k.dtype,
            window=options.get("window", 0),
        )  # fmt: skip
    return paged_attention(batch.q, batch.k, batch.v, meta, **options)


def part(batch: AttentionBatch, positions: list[int], chunk: tuple[int, int]) -> AttentionBatch:
    """Tokens of the batch's first row, as decode rows and as a chunk, with the third row's token as a chunk beside."""
    meta, (first, last) = batch.meta, chunk
    mine, other = meta.seq_slots[0], meta.seq_slots[2]
    slots = torch.stack([*[mine] * (len(positions) + 1), other])
    lengths = [position + 1 for position in positions] + [last, batch.rows[2][1]]
    starts = [*range(len(positions) + 1), len(positions) + last - first, len(positions) + last - first + 1]
    device = batch.q.device
    q = torch.cat((batch.q[positions], batch.q[first:last], batch.q[-1:], torch.zeros_like(batch.q[:2])))
    return replace(batch, q=q, meta=AttentionMeta(
        meta.page_table, slots, torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device), len(positions), last - first, 141,
        attention_workspace(len(lengths), q.shape[1], q.shape[2], device),
    ))  # fmt: skip
