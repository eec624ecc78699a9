"""Sums over real GPUs, a process each: the definition's bits, eager and from a graph, in whatever order sizes come."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from stoker_kernels.all_reduce import peer_sums, reference
from stoker_kernels.all_reduce.bench import exchange_by
from stoker_kernels.all_reduce.rule import LARGEST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two CUDA devices"),
]
EPS, STEPS = 1e-6, 60


def shapes(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    widths = rng.choices((1032, 3584, 8192, 11080), k=STEPS)
    return [(rng.randint(1, min(300, LARGEST // (2 * hidden))), hidden) for hidden in widths]


def parts_of(step: int, shape: tuple[int, int], ranks: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).bfloat16().to(device) for _ in range(ranks)]


def rank_main(rank: int, ranks: int, store_path: str, seed: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    exchange = exchange_by(FileStore(store_path, ranks), rank, ranks)
    sums = peer_sums(device, rank, ranks, exchange)
    for step, shape in enumerate(shapes(seed)):
        parts = parts_of(step, shape, ranks, device)
        assert torch.equal(sums.sum(parts[rank].clone()), reference.total(parts))
        stream = torch.ones(shape, dtype=torch.bfloat16, device=device)
        weight = torch.full((shape[1],), 0.7, device=device)
        again = stream.clone()
        mine = sums.sum_add_rms_norm(parts[rank].clone(), stream, weight.bfloat16(), EPS)
        expected = reference.total_add_rms_norm(parts, again, weight.bfloat16(), EPS)
        assert torch.equal(stream, again)
        torch.testing.assert_close(mine.float(), expected.float(), rtol=0.008, atol=1e-6)
        quantized = sums.sum_add_rms_norm_quant(parts[rank].clone(), again.clone(), weight, EPS)
        wide = reference.total_add_rms_norm_quant(parts, again, weight, EPS)
        torch.testing.assert_close(quantized.scale, wide.scale, rtol=1e-5, atol=0.0)
        assert (quantized.data.float() == wide.data.float()).float().mean() > 0.99

    x = torch.zeros(24, 3584, dtype=torch.bfloat16, device=device)
    sums.sum(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            sums.sum(x)
    for step in range(20):
        parts = parts_of(step, (24, 3584), ranks, device)
        x.copy_(parts[rank] * 0.01)
        graph.replay()
        each = [part * 0.01 for part in parts]
        for _ in range(5):
            each = [reference.total(each)] * ranks
        assert torch.equal(x, each[0])
    sums.close(exchange)


def test_the_sums_of_the_definition(tmp_path: Path) -> None:
    ranks, seed = torch.cuda.device_count(), random.randrange(1 << 20)
    print(f"seed {seed}")
    spawn(rank_main, (ranks, str(tmp_path / "store"), seed), nprocs=ranks)
