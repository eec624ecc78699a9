"""The reference of attention against its definition, one query and head at a time; and what the op refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.attention.batches import AttentionBatch, Shape, random_batch

from stoker_kernels.attention import (
    AttentionMeta,
    BlockPattern,
    attention_kernels,
    paged_attention,
    plan_attention,
)
from stoker_kernels.attention.cpu_attention import attend_rows
from stoker_kernels.launch import cc, cuda, dispatch, nvcc
from stoker_kernels.launch.dispatch import KernelUnavailable, select

ROWS = [(1, 5), (1, 0), (1, 40), (7, 7), (20, 50), (0, 0)]


def shown(pattern: BlockPattern, head: int, position: int, keys: torch.Tensor) -> torch.Tensor:
    """Which keys a head sees from a position: of near blocks all, of others those of its own column of blocks."""
    blocks, column = keys.numpy() // pattern.block, (head + pattern.first_head) * pattern.step
    near = blocks > position // pattern.block - pattern.local
    return torch.tensor([bool(is_near) or (block + column + 1) % pattern.stride == 0
                         for is_near, block in zip(near, blocks, strict=True)])  # fmt: skip


def by_definition(shape: Shape, batch: AttentionBatch, **options: Any) -> torch.Tensor:
    """Softmax of each query over the keys it may see, in float64."""
    meta: AttentionMeta = batch.meta
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    starts = meta.query_start.tolist()
    for row, (queries, keys) in enumerate(batch.rows):
        slot = meta.seq_slots[row]
        for i in range(queries if keys else 0):
            position = keys - queries + i
            first = max(0, position - options.get("window", 0) + 1) if options.get("window") else 0
            index = torch.arange(first, position + 1)
            pages = meta.page_table[slot, index // shape.page].long()
            k = batch.k[pages, :, index % shape.page].double()
            v = batch.v[pages, :, index % shape.page].double()
            for head in range(shape.q_heads):
                kv = head // (shape.q_heads // shape.kv_heads)
                k_scale = float(batch.k_scale[kv]) if batch.k_scale is not None else 1.0
                v_scale = float(batch.v_scale[kv]) if batch.v_scale is not None else 1.0
                logits = k[:, kv] @ batch.q[starts[row] + i, head].double() * (batch.scale * k_scale)
                if options.get("softcap"):
                    logits = options["softcap"] * torch.tanh(logits / options["softcap"])
                if options.get("slopes") is not None:
                    logits = logits - float(options["slopes"][head]) * (position - index)
                if options.get("pattern") is not None:
                    logits[~shown(options["pattern"], head, position, index)] = -math.inf
                weights = logits.exp()
                total = weights.sum()
                if options.get("sinks") is not None:
                    total = total + math.exp(float(options["sinks"][head]))
                out[starts[row] + i, head] = (weights / total) @ v[:, kv] * v_scale
    return out


@pytest.mark.parametrize(
    "options",
    [
        {}, {"window": 9}, {"softcap": 2.0}, {"sinks": torch.linspace(-2, 2, 6)}, {"window": 17, "softcap": 5.0},
        {"slopes": torch.linspace(0.02, 0.7, 6)}, {"pattern": BlockPattern(16, 1, 3, 1)},
        {"pattern": BlockPattern(16, 1, 6, 0), "slopes": torch.linspace(0.02, 0.7, 6), "window": 40},
    ],
    ids=["plain", "window", "softcap", "sinks", "window and softcap", "slopes", "pattern", "pattern and others"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_reference_is_the_definition(dtype: torch.dtype, options: dict[str, object]) -> None:
    shape = Shape(page=16, kv_heads=2, q_heads=6, dim=32, cache=dtype)
    batch = random_batch(shape, ROWS, decodes=3, padding=4)
    got = paged_attention(batch.q, batch.k, batch.v, batch.meta, **batch.options, **options)
    torch.testing.assert_close(got.double(), by_definition(shape, batch, **options), atol=2e-6, rtol=2e-5)


@pytest.mark.skipif(cc.refusal("cpu_rows") is not None, reason="cpu_rows is not compiled")
@pytest.mark.parametrize("options", [
    {"slopes": torch.linspace(0.02, 0.7, 6)}, {"pattern": BlockPattern(16, 1, 3, 1, 2)},
    {"pattern": BlockPattern(32, 2, 5, 0), "sinks": torch.linspace(-2, 2, 6), "softcap": 3.0},
], ids=["slopes", "pattern", "pattern and others"])  # fmt: skip
def test_token_by_token_it_is_the_definition(options: dict[str, object]) -> None:
    shape = Shape(page=16, kv_heads=2, q_heads=6, dim=32)
    batch = random_batch(shape, [*ROWS, (3, 150)], decodes=3, padding=4)
    got = attend_rows(batch.q, batch.k, batch.v, batch.meta, **batch.options, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(got.double(), by_definition(shape, batch, **options), atol=2e-6, rtol=2e-5)


def test_decode_rows_may_be_split_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(page=16, kv_heads=2, q_heads=6, dim=32)
    batch = random_batch(shape, [(1, n) for n in (3, 0, 70, 16, 17, 31, 1)], decodes=7)
    whole = paged_attention(batch.q, batch.k, batch.v, batch.meta, **batch.options)
    monkeypatch.setattr("stoker_kernels.attention.reference.MAX_GATHERED", 2 * 70 * 2 * 32)
    torch.testing.assert_close(paged_attention(batch.q, batch.k, batch.v, batch.meta, **batch.options), whole)


def test_a_step_of_padding_alone_is_zero() -> None:
    batch = random_batch(Shape(), [(1, 0)] * 3, decodes=3)
    assert not paged_attention(batch.q, batch.k, batch.v, batch.meta, **batch.options).any()


def test_the_result_goes_to_out() -> None:
    batch = random_batch(Shape(), ROWS, decodes=3)
    out = torch.full_like(batch.q, float("nan"))
    assert paged_attention(batch.q, batch.k, batch.v, batch.meta, out=out, **batch.options) is out
    assert out.isfinite().all()


def test_planning_on_the_cpu_changes_nothing() -> None:
    batch = random_batch(Shape(), ROWS, decodes=3)
    planned = plan_attention(batch.meta, num_tokens=len(batch.q), num_kv_heads=2, head_dim=32, kv_dtype=torch.float32)
    assert planned == replace(batch.meta, planned_window=None)


def test_integers_have_no_kernel() -> None:
    with pytest.raises(KernelUnavailable, match="paged_attention with int8 on sm_90"):
        _select_on_sm90(torch.int8)


def _select_on_sm90(dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker_kernels.launch.dispatch.sm_of", lambda device: 90)
        select("paged_attention", torch.device("cuda", 0), dtype)


def test_bfloat16_needs_sm80() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker_kernels.launch.dispatch.sm_of", lambda device: 75)
        with pytest.raises(KernelUnavailable, match="needs sm_80"):
            select("paged_attention", torch.device("cuda", 7), torch.bfloat16)


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("capability", "built", "kv_dtype", "head_dim", "names"),
    [
        ((8, 0), True, BF16, 128, "triton"),
        ((9, 0), True, BF16, 64, "triton; no sm90_decode: takes heads of 128, up to 8 a KV head"),
        ((9, 0), True, torch.float16, 128, "triton; no sm90_decode: takes a cache of bfloat16 or e4m3"),
        ((9, 0), True, FP8, 128, "sm90_decode; sm90_mixed with chunks"),
        (
            (9, 0), True, BF16, 128,
            "sm90_decode; sm90_mixed with chunks; triton for chunks alone; "
            "sm90_prefill from 2049 tokens of them without a window",
        ),
        (
            (9, 0), False, BF16, 128,
            f"triton; no sm90_decode: {nvcc.cubin_name('sm90_decode', 'sm_90a')} is not built: "
            "run python -m stoker_kernels.launch.nvcc",
        ),
    ],
)  # fmt: skip
def test_the_start_log_names_the_kernels_behind_attention(
    capability: tuple[int, int],
    built: bool,
    kv_dtype: torch.dtype,
    head_dim: int,
    names: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stem in ("sm90_decode", "sm90_mixed", "sm90_prefill") if built else ():
        (tmp_path / nvcc.cubin_name(stem, "sm_90a")).touch()
    monkeypatch.setattr(cuda, "aot_folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(dispatch, "_sms", {})
    got = attention_kernels(torch.device("cuda", 0), kv_dtype=kv_dtype, head_dim=head_dim, group=7)
    assert got == names
    if "with chunks" in names:
        capped = attention_kernels(torch.device("cuda", 0), kv_dtype=kv_dtype, head_dim=128, group=7, softcap=31.0)
        assert capped == "sm90_decode; triton for chunks: the kernels of SM 9.0 for them take no soft-cap"
        sizes = {"kv_dtype": kv_dtype, "head_dim": 128, "group": 7}
        sloped = attention_kernels(torch.device("cuda", 0), slopes=True, **sizes)
        assert sloped == "triton; no sm90_decode: takes no slopes (ALiBi)"
        blocks = attention_kernels(torch.device("cuda", 0), patterns=True, **sizes)
        assert blocks == "sm90_decode; triton for layers that see some blocks alone, and for chunks"
