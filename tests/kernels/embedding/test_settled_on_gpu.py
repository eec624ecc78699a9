"""What was written before an embedding is settled for the kernels behind it, which read it ahead of their turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.block_gemm.test_planes import in_planes, mild_rows

from stoker_kernels import embedding, rope
from stoker_kernels.block_gemm import block_rows
from stoker_kernels.launch.pdl import enable_pdl, launch_options, pdl_wait
from stoker_kernels.quant import PLANE_KINDS, BlockWeight

TOKENS, HIDDEN, HEADS, DIM, PAGE = 9, 768, (4, 2), 64, 16
SPIN = 3000
"""Loads one after the other, some 300 ns each: longer than everything behind them."""


@triton.jit
def _late(
    positions_in, slots_in, positions, slots, zero, COUNT: tl.constexpr, SPIN: tl.constexpr, LAUNCH_PDL: tl.constexpr
):  # fmt: skip
    """Describes a step, and takes its time."""
    pdl_wait(LAUNCH_PDL)
    seen = tl.load(zero)
    for _ in range(SPIN):
        seen += tl.load(zero + seen, volatile=True)
    at = tl.arange(0, 16)
    tl.store(positions + at, tl.load(positions_in + at, mask=at < COUNT) + seen, mask=at < COUNT)
    tl.store(slots + at, tl.load(slots_in + at, mask=at < COUNT) + seen, mask=at < COUNT)


@pytest.fixture
def dependent() -> Iterator[None]:
    enable_pdl(True)
    yield
    enable_pdl(False)


def embeddings(kind: str, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A table of this kind, looked up by ids."""
    if kind == "dense":
        table = torch.randn(50, HIDDEN, device=device).bfloat16()
        return lambda ids: embedding.embed(ids, table)
    blocks = BlockWeight((in_planes(kind, mild_rows(kind, 50, HIDDEN), HIDDEN, device),), HIDDEN)
    return lambda ids: block_rows(ids, blocks, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.usefixtures("dependent")
@pytest.mark.parametrize("kind", ["dense", *PLANE_KINDS])
def test_keys_lie_where_a_late_description_says(kind: str, device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("dependent launches come with SM 9.0")
    embed = embeddings(kind, device)
    q_heads, kv_heads = HEADS
    qkv = torch.randn(TOKENS, (q_heads + 2 * kv_heads) * DIM, device=device).bfloat16()
    cos_sin, ids = torch.randn(200, DIM, device=device), torch.arange(TOKENS, dtype=torch.int32, device=device)
    given = [torch.zeros(16, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)]
    told = [torch.zeros_like(each) for each in given]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    caches = [torch.zeros(8, kv_heads, PAGE, DIM, device=device).bfloat16() for _ in range(2)]
    options = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": DIM}

    def step() -> torch.Tensor:
        _late[(1,)](*given, *told, zero, COUNT=TOKENS, SPIN=SPIN, **launch_options(device))
        embed(ids)
        positions, slots = (each[:TOKENS] for each in told)
        return rope.qk_norm_rope_kv_write(qkv, positions, slots, cos_sin, *caches, **options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
        for _ in range(5):
            given[0].copy_(torch.randint(200, (16,), dtype=torch.int32))
            given[1].copy_(torch.tensor(random.sample(range(8 * PAGE), 16)))
            for each in (*told, *caches):
                each.zero_()
            graph.replay()
            stream.synchronize()
            expected = [torch.zeros_like(each) for each in caches]
            positions, slots = (each[:TOKENS].clone() for each in given)
            enable_pdl(False)
            q = rope.qk_norm_rope_kv_write(qkv, positions, slots, cos_sin, *expected, **options)
            enable_pdl(True)
            assert torch.equal(found, q)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(caches, expected, strict=True))
