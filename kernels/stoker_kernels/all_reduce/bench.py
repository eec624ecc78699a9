"""Times sums over GPUs beside NCCL's, in graphs: `python -m stoker_kernels.all_reduce.bench [--ranks N]`.

Each size is checked first: the sum of known values, on every rank. Then a graph of many sums is replayed, and the
median of its replays is shown a sum, with what NVLink would need for the words that a rank sends.
Invariants: one process a GPU; all ranks run the same sums.
Knows nothing of models.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from stoker_kernels.all_reduce.memory import Exchange
from stoker_kernels.all_reduce.peer_sums import PeerSums, peer_sums
from stoker_kernels.all_reduce.rule import shots_for

HIDDEN = 4096
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SUMS, REPLAYS = 40, 15
NVLINK = 450e9  # bytes a second, one way, of an H100's or H200's eighteen links


def microseconds(run: Callable[[], object]) -> float:
    """One of SUMS calls of `run` in a graph: the median over replays."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SUMS):
            run()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / SUMS)
    return float(statistics.median(times))


def check(total: Callable[[Tensor], Tensor], x: Tensor, rank: int, ranks: int) -> None:
    """Raise RuntimeError unless rank r's values r + 1 add up."""
    x.fill_(rank + 1)
    if not bool((total(x) == ranks * (ranks + 1) // 2).all()):
        raise RuntimeError(f"rank {rank}: a wrong sum of {tuple(x.shape)}")


def row(sums: PeerSums, rows: int, rank: int, ranks: int, device: torch.device) -> str:
    """One size: KiB, shots, the own kernel, with norm after it, NCCL, and the wire's time."""
    x = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
    size = x.numel() * 2

    def nccl(y: Tensor) -> Tensor:
        dist.all_reduce(y)
        return y

    check(nccl, x, rank, ranks)
    theirs = microseconds(lambda: nccl(x.zero_()))
    shots, own, normed = shots_for(rows, HIDDEN * 2, ranks), float("nan"), float("nan")
    if shots is not None:
        check(sums.sum, x, rank, ranks)
        own = microseconds(lambda: sums.sum(x.zero_()))
        stream, weight = torch.zeros_like(x), torch.ones(HIDDEN, dtype=x.dtype, device=device)
        normed = microseconds(lambda: sums.sum_add_rms_norm(x.zero_(), stream, weight, 1e-6))
    sent = size * (ranks - 1) * (1 if shots == 1 else 2 / ranks)
    return f"{size >> 10:8} {shots or '-':>5} {own:9.2f} {normed:9.2f} {theirs:9.2f} {sent / NVLINK * 1e6:9.2f}"


def exchange_by(store: FileStore, rank: int, ranks: int) -> Exchange:
    """How ranks that share a file tell each other anything."""
    rounds = itertools.count()

    def exchange(text: str) -> list[str]:
        told = next(rounds)
        store.set(f"{told} {rank}", text)
        return [store.get(f"{told} {each}").decode() for each in range(ranks)]

    return exchange


def rank_main(rank: int, ranks: int, folder: str) -> None:
    """One rank's process."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    meeting = FileStore(f"{folder}/nccl", ranks)
    dist.init_process_group("nccl", store=meeting, rank=rank, world_size=ranks, device_id=device)
    exchange = exchange_by(FileStore(f"{folder}/peers", ranks), rank, ranks)
    sums = peer_sums(device, rank, ranks, exchange)
    if rank == 0:
        print(f"{ranks} x {torch.cuda.get_device_name(device)}; µs a sum of bf16 rows of {HIDDEN}, a fill included")
        print("     KiB shots       own  and norm      NCCL      wire")
    for rows in ROWS:
        line = row(sums, rows, rank, ranks, device)
        if rank == 0:
            print(line, flush=True)
    sums.close(exchange)
    dist.destroy_process_group()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="GPUs (default: all)")
    ranks = parser.parse_args().ranks
    if not 2 <= ranks <= torch.cuda.device_count():
        raise SystemExit(f"--ranks {ranks}: this machine has {torch.cuda.device_count()} GPUs, and a sum takes two")
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (ranks, folder), nprocs=ranks)


if __name__ == "__main__":
    main()
