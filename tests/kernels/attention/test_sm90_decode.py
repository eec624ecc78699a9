"""The decode kernel of csrc/sm90_decode.cuh, run on the CPU by `emulator/`: fragments, ring, shares, masks."""

from __future__ import annotations

import ctypes
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.attention.batches import AttentionBatch, Shape, give_up, random_batch
from tests.kernels.emulator.build import compile_emulated
from tests.kernels.emulator.decode import Plan, decode_step

from stoker_kernels.attention.reference import Cache, reference_attention
from stoker_kernels.attention.sm90_decode import DecodeArguments

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    parts = ("ring", "producer", "fragments", "consumers")
    sources = ("sm90_decode.cuh", *(f"decode_{part}.cuh" for part in parts))
    library = compile_emulated(sources, "decode.cpp", tmp_path_factory.mktemp("emulator"))
    assert library.arguments_size() == ctypes.sizeof(DecodeArguments)
    return library


def run(kernels: ctypes.CDLL, batch: AttentionBatch, plan: Plan, *, seed: int = 0, **options: Any) -> torch.Tensor:
    step = decode_step(batch, plan, **options)
    ctas = plan.ctas if plan.tail else len(step.shares)
    return step.launch(kernels.decode, ctas, seed, step.arguments)


def check(kernels: ctypes.CDLL, shape: Shape, lengths: list[int], plan: Plan, **options: object) -> None:
    batch = random_batch(shape, [(1, n) for n in lengths], decodes=len(lengths))
    got = run(kernels, batch, plan, **options)  # type: ignore[arg-type]
    op = {name: options[name] for name in ("window", "softcap", "sinks") if name in options}
    want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options, **op)  # type: ignore[arg-type]
    torch.testing.assert_close(got.float(), want, atol=1.2e-2, rtol=1.2e-2)


def shape(page: int, kv_heads: int, group: int, cache: torch.dtype) -> Shape:
    return Shape(page, kv_heads, kv_heads * group, 128, cache, BF16)


LENGTHS = [1, 0, 63, 64, 65, 300, 17, 129]


@pytest.mark.matrix("plan")
@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(
    "plan", [Plan(1), Plan(3), Plan(5), Plan(100), Plan(2, pieces=True), Plan(8, pieces=True)], ids=str
)
def test_each_cut_matches(kernels: ctypes.CDLL, plan: Plan, cache: torch.dtype) -> None:
    check(kernels, shape(64, 2, 7, cache), LENGTHS, plan)


@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("page", "kv_heads", "group"), [(16, 1, 8), (32, 3, 3), (128, 2, 1)])
def test_each_page_and_group_matches(
    kernels: ctypes.CDLL, page: int, kv_heads: int, group: int, cache: torch.dtype
) -> None:
    check(kernels, shape(page, kv_heads, group, cache), [200, 0, 1, 77, 150], Plan(3), seed=page)


def test_rows_of_many_pages_match(kernels: ctypes.CDLL) -> None:
    check(kernels, shape(16, 2, 2, FP8), [1100, 40, 600], Plan(13), stages=4)
    check(kernels, shape(64, 1, 2, FP8), [2500, 2200], Plan(50), stages=6)


@pytest.mark.parametrize("plan", [Plan(2), Plan(2, window=70), Plan(9, window=100), Plan(1, True, 70)], ids=str)
def test_a_window_matches(kernels: ctypes.CDLL, plan: Plan) -> None:
    check(kernels, shape(64, 2, 4, BF16), [1, 0, 70, 71, 300, 129, 192], plan, window=70)


@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_pages_that_were_given_up_are_not_read(kernels: ctypes.CDLL, page: int, cache: torch.dtype) -> None:
    batch = random_batch(shape(page, 2, 3, cache), [(1, n) for n in (1, 0, 300, 129, 520)], decodes=5)
    plan = Plan(2, window=70)
    want = run(kernels, batch, plan, window=70)
    assert torch.equal(run(kernels, give_up(batch, 70), plan, window=70), want)


def test_sinks_and_soft_cap_match(kernels: ctypes.CDLL) -> None:
    sinks = torch.linspace(-2.0, 4.0, 6)
    check(kernels, shape(64, 2, 3, BF16), [0, 5, 200, 64], Plan(2), sinks=sinks, softcap=3.0)
    check(kernels, shape(64, 2, 3, FP8), [0, 5, 200, 64], Plan(7), sinks=sinks)


@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("stages", [2, 6])
def test_a_step_that_is_not_settled_matches(kernels: ctypes.CDLL, stages: int, cache: torch.dtype) -> None:
    check(kernels, shape(64, 2, 7, cache), LENGTHS, Plan(3), stages=stages, settled=False)


@pytest.mark.parametrize(("stages", "cache"), [(2, BF16), (3, BF16), (6, BF16), (9, FP8)])
def test_keys_of_earlier_steps_are_loaded_ahead(kernels: ctypes.CDLL, stages: int, cache: torch.dtype) -> None:
    lengths = [257, 64, 1, 130, 449, 128, 0, 65]
    for per_cta in (1, 4, 7, 40):
        check(kernels, shape(64, 2, 7, cache), lengths, Plan(per_cta), stages=stages, seed=per_cta)


@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "e4m3"])
def test_drafts_see_each_other_across_units(kernels: ctypes.CDLL, cache: torch.dtype) -> None:
    """Rows of one sequence, a token further each: what the step writes lies before the last row's last unit, too."""
    for first, drafts in ((63, 3), (120, 16), (190, random.randint(4, 10)), (64 * random.randint(1, 5) + 1, 5)):
        lengths = [300, *range(first, first + drafts + 1), 65]
        batch = random_batch(shape(64, 2, 7, cache), [(1, n) for n in lengths], decodes=len(lengths), seed=first)
        slots = batch.meta.seq_slots.clone()
        slots[1:-1] = slots[-2]  # the longest one's
        batch = replace(batch, meta=replace(batch.meta, seq_slots=slots, fresh=drafts + 1))
        want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options)
        got = run(kernels, batch, Plan(random.randint(1, 9)), stages=6, seed=drafts)
        torch.testing.assert_close(got.float(), want, atol=1.2e-2, rtol=1.2e-2)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_copies_or_ctas_changes_a_bit(kernels: ctypes.CDLL, seed: int) -> None:
    batch = random_batch(shape(64, 2, 7, BF16), [(1, n) for n in (300, 90, 200)], decodes=3)
    plain = run(kernels, batch, Plan(2), stages=2)
    assert torch.equal(run(kernels, batch, Plan(2), stages=5, seed=seed + 1), plain)


TAILED = [300, 1, 0, 700, 64, 90, 513, 65, 640, 1000, 200, 30, 150]


@pytest.mark.matrix("plan")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(14, ctas=3, tail=4),
        Plan(3, ctas=5, tail=11),
        Plan(20, ctas=4, tail=5),
        Plan(2, whole=True),
        Plan(9, whole=True),
    ],
    ids=str,
)
def test_whole_streams_and_a_tail_match(kernels: ctypes.CDLL, plan: Plan, cache: torch.dtype, seed: int) -> None:
    check(kernels, shape(64, 2, 7, cache), TAILED, plan, seed=seed, stages=2 + 2 * seed, settled=seed > 0)


@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("plan", "parts"), [(Plan(1), 3), (Plan(5), 1), (Plan(9, whole=True), 6)], ids=str)
def test_results_of_keys_before_are_merged(
    kernels: ctypes.CDLL, plan: Plan, parts: int, cache: torch.dtype
) -> None:
    """What the rows attended elsewhere weighs by its log-sum-exp; one row has nothing of it, and padding stays zero."""
    lengths = [130, 0, 1, 64, 300]
    batch = random_batch(shape(32, 2, 5, cache), [(1, n) for n in lengths], decodes=len(lengths), seed=parts)
    generator = torch.Generator().manual_seed(parts)
    values = torch.randn(parts, *batch.q.shape, generator=generator)
    lse = torch.randn(parts, *batch.q.shape[:2], generator=generator) * 3 + 8
    for row in (1, 3):
        values[:, row], lse[:, row] = 0.0, -torch.inf
    got = run(kernels, batch, plan, before=(values, lse))
    own = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options)
    v_scale = torch.ones(2) if batch.v_scale is None else batch.v_scale
    results = torch.cat((own[None], values * v_scale.repeat_interleave(5)[:, None]))
    weights = torch.softmax(torch.cat((log2_sums(batch)[None], lse)) * math.log(2), 0).nan_to_num(0.0)
    want = (results * weights[..., None]).sum(0)
    torch.testing.assert_close(got.float(), want, atol=1.2e-2, rtol=1.2e-2)
    assert not got[1].any()


def log2_sums(batch: AttentionBatch) -> torch.Tensor:
    """log2 of the sums of the rows' weights, `[rows, Hq]`."""
    group = batch.q.shape[1] // batch.k.shape[1]
    cache = Cache(batch.k, batch.v, batch.k_scale, batch.v_scale)
    sums = torch.full(batch.q.shape[:2], -torch.inf)
    for row, (_, keys) in enumerate(batch.rows):
        if keys:
            slot = batch.meta.seq_slots[row : row + 1].long()
            k = cache.gather(batch.meta.page_table[slot], keys)[0][0].repeat_interleave(group, 0)
            logits = torch.einsum("hd,hkd->hk", batch.q[row].float(), k) * batch.scale
            sums[row] = torch.logsumexp(logits, -1) / math.log(2)
    return sums
