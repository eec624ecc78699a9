"""Sums over real GPUs, a process each: the definition's bits, eager and from a graph, in whatever order sizes come.

More ranks than GPUs share them, a process after the other: so two shots run, which two ranks never take.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from stoker_kernels.all_reduce import peer_sums, reference, row_shares
from stoker_kernels.all_reduce.bench import exchange_by
from stoker_kernels.all_reduce.rule import LEAST_SHARE, MOST_RANKS, largest
from stoker_kernels.quant import Quantized

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two CUDA devices")
EPS, STEPS = 1e-6, 60


def shapes(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    widths = rng.choices((1032, 3584, 8192, 11080), k=STEPS)
    return [(rng.randint(1, min(300, largest(8) // (2 * hidden))), hidden) for hidden in widths]


def parts_of(step: int, shape: tuple[int, int], ranks: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).bfloat16().to(device) for _ in range(ranks)]


def checksum(words: torch.Tensor) -> int:
    """Another one where a number is another, or elsewhere."""
    at = torch.arange(1, words.numel() + 1, device=words.device)
    return int((words.flatten().long() * at).sum())


def rank_main(rank: int, ranks: int, store_path: str, seed: int) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
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
        told = exchange(f"{checksum(quantized.data.view(torch.int8))} {checksum(quantized.scale.view(torch.int32))}")
        assert len(set(told)) == 1, "ranks have other bits"

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


@two_gpus
def test_the_sums_of_the_definition(tmp_path: Path) -> None:
    ranks, seed = torch.cuda.device_count(), random.randrange(1 << 20)
    print(f"seed {seed}")
    spawn(rank_main, (ranks, str(tmp_path / "store"), seed), nprocs=ranks)


def sizes_main(rank: int, ranks: int, store_path: str, seed: int) -> None:
    """Rows as narrow as peaks of parts and as wide as a model's, from 16 KiB to 32 MiB, each size by chance."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    exchange = exchange_by(FileStore(store_path, ranks), rank, ranks)
    sums = peer_sums(device, rank, ranks, exchange)
    draw, taken = random.Random(seed), []
    for step in range(2 * STEPS):
        width = draw.choice((8 * ranks, 8 * draw.randint(3, 90), 8 * draw.randint(91, 1400)))
        rows = max(1, int(2 ** draw.uniform(14, 25)) // (2 * width))
        generator = torch.Generator(device).manual_seed(seed + step)
        parts = [torch.randn(rows, width, generator=generator, device=device).bfloat16() for _ in range(ranks)]
        own = parts[rank].clone()
        size = own.nbytes
        assert sums.serves(own) == (size <= largest(ranks)), (rows, width)
        if size <= largest(ranks):
            taken.append(size)
            assert torch.equal(sums.sum(own), reference.total(parts)), (rows, width)
    assert min(taken) < 1 << 16
    assert max(taken) > largest(ranks) // 4
    sums.close(exchange)


@two_gpus
def test_sums_of_every_size(tmp_path: Path) -> None:
    ranks, seed = torch.cuda.device_count(), random.randrange(1 << 20)
    print(f"seed {seed}")
    spawn(sizes_main, (ranks, str(tmp_path / "store"), seed), nprocs=ranks)


def shares_main(rank: int, ranks: int, store_path: str, seed: int) -> None:
    """Exchange after exchange of other sizes, each rank with pauses of its own before what it gives."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    exchange = exchange_by(FileStore(store_path, ranks), rank, ranks)
    draw, own_draw = random.Random(seed), random.Random(seed + rank)
    hidden, most = draw.choice((1032, 3584)), ranks * LEAST_SHARE + 2048
    least = ranks * LEAST_SHARE
    end = row_shares(device, rank, ranks, exchange, range(least, most + 1), hidden)
    end.try_once()
    assert end.shares(most + 1, torch.bfloat16) == ()
    assert end.shares(least - 1, torch.bfloat16) == ()
    weight = torch.full((hidden,), 0.7, device=device)
    for step in range(STEPS):
        tokens, quantized = draw.randint(least, most), draw.random() < 0.5
        shares = end.shares(tokens, torch.bfloat16)
        generator = torch.Generator(device).manual_seed(seed + step)
        parts = [torch.randn(tokens, hidden, generator=generator, device=device).bfloat16() for _ in range(ranks)]
        stream = torch.randn(tokens, hidden, generator=generator, device=device).bfloat16()
        again = stream.clone()
        for share in end.outgoing(shares):
            for rows in share.pieces(1 if share.owner == rank else own_draw.randint(1, 3)):
                torch.cuda._sleep(own_draw.randrange(1, 400_000))
                end.give(share, parts[rank][rows].clone(), rows.start - share.start)
        mine = shares[rank]
        end.sum_add_rms_norm(mine, stream[mine.rows], weight, EPS, quantized=quantized)
        got: list[torch.Tensor | Quantized] = [torch.empty(0)] * ranks
        for share in end.incoming(shares):
            found = end.rows(share)
            torch.cuda._sleep(own_draw.randrange(1, 400_000))
            got[share.owner] = (
                Quantized(found.data.clone(), found.scale.clone()) if isinstance(found, Quantized) else found.clone()
            )
        if quantized:
            wide = reference.total_add_rms_norm_quant(parts, again, weight, EPS)
            data = torch.cat([each.data for each in got if isinstance(each, Quantized)])
            scale = torch.cat([each.scale for each in got if isinstance(each, Quantized)])
            torch.testing.assert_close(scale, wide.scale, rtol=1e-5, atol=0.0)
            assert (data.float() == wide.data.float()).float().mean() > 0.99
        else:
            expected = reference.total_add_rms_norm(parts, again, weight.bfloat16(), EPS)
            rows = torch.cat([each for each in got if isinstance(each, torch.Tensor)])
            torch.testing.assert_close(rows.float(), expected.float(), rtol=0.016, atol=1e-6)
        assert torch.equal(stream[mine.rows], again[mine.rows])
    end.close(exchange)


@two_gpus
def test_rows_that_are_shared_out(tmp_path: Path) -> None:
    ranks, seed = torch.cuda.device_count(), random.randrange(1 << 20)
    print(f"seed {seed}")
    spawn(shares_main, (ranks, str(tmp_path / "store"), seed), nprocs=ranks)


@pytest.mark.parametrize("main", [rank_main, sizes_main])
def test_sums_of_more_ranks_than_gpus(main: Callable[[int, int, str, int], None], tmp_path: Path) -> None:
    gpus, draw = torch.cuda.device_count(), random.SystemRandom()
    ranks, seed = draw.randint(max(3, gpus + 1), MOST_RANKS), draw.randrange(1 << 20)
    print(f"{ranks} ranks on {gpus} GPUs, seed {seed}")
    spawn(main, (ranks, str(tmp_path / "store"), seed), nprocs=ranks)
