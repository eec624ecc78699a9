"""What moving KV pages to the host and back costs, on a GPU: `python -m stoker_runtime.bench.swap_cost`.

Checks first that pages come back bit by bit. Then prints how long pinning takes, the speed of the link in each
direction, and by how much steps grow when pages move beside them: `alone` against steps that move pages out, in, or
both. The figures of `executor/host_memory.py` are to be near these. Knows nothing of models or schedules.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from stoker_runtime.executor.host_memory import LANE_BYTES, HostPlan
from stoker_runtime.executor.page_swap import PageSwap, by_page

Moves = list[tuple[int, int]]
ROUNDS = 20


def check(swap: PageSwap, pages: torch.Tensor, count: int) -> None:
    """Random bits go out, are overwritten at once, and come back to other pages."""
    pages.random_()
    before = pages[:count].clone()
    swap.move([(page, page) for page in range(count)], [])
    pages.zero_()
    swap.move([], [(page, count - 1 - page) for page in range(count)])
    if not torch.equal(pages[:count].flip(0), before):
        raise SystemExit("swap_cost: a page came back with other bits")


def milliseconds(run: Callable[[], None]) -> float:
    """Median time of `run`, device included."""
    taken = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


def step_milliseconds(step: Callable[[], None], move: Callable[[], None]) -> float:
    """Median time of a step among others, one step ahead, when every step is launched after `move`."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 2)]
    for mark in marks:
        move()
        step()
        mark.record()
    torch.cuda.synchronize()
    taken: list[float] = [before.elapsed_time(after) for before, after in pairwise(marks[1:])]
    return statistics.median(taken)


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--pages", type=int, default=2048, help="on the device; half as many on the host")
    parser.add_argument("--moves", type=int, nargs="+", default=[1, 4, 16, 64], help="pages that a step moves")
    given = parser.parse_args()
    device = torch.device("cuda")
    arena = torch.zeros((given.layers, 2, given.pages, given.kv_heads, 64, 128), dtype=torch.bfloat16, device=device)
    page_bytes, hosted = arena.nbytes // given.pages, given.pages // 2
    began = time.perf_counter()
    swap = PageSwap(arena, HostPlan(hosted, page_bytes, 0.0, max(1, LANE_BYTES // page_bytes)))
    print(f"pages of {page_bytes / 1024**2:.2f} MiB; {hosted * page_bytes / 1024**3:.2f} GiB pinned in "
          f"{time.perf_counter() - began:.2f} s")  # fmt: skip
    pages = by_page(arena)
    check(swap, pages, min(hosted, 200))
    out: Moves = [(page, page) for page in range(hosted)]
    back: Moves = [(page, hosted + page) for page in range(hosted)]
    half = hosted // 2
    for name, moves in (("out", (out[:half], [])), ("in", ([], back[half:])), ("both ways", (out[:half], back[half:]))):
        taken = milliseconds(lambda moves=moves: swap.move(*moves))  # type: ignore[misc]
        speed = half * page_bytes / taken / 1e6
        print(f"{name:<10} {speed:6.1f} GB/s each way, {taken / half * 1e3:.0f} µs a page")
    work = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)

    def step() -> None:
        for _ in range(6):
            torch.mm(work, work)

    alone = step_milliseconds(step, lambda: None)
    print(f"a step alone {alone:.3f} ms; beside moves:")
    print(f"{'pages':>6} {'out':>9} {'in':>9} {'both':>9}   ms longer")
    for count in given.moves:
        longer = [
            step_milliseconds(step, lambda moves=moves: swap.move(*moves)) - alone  # type: ignore[misc]
            for moves in ((out[:count], []), ([], back[:count]), (out[:count], back[-count:]))
        ]
        print(f"{count:>6} {longer[0]:9.3f} {longer[1]:9.3f} {longer[2]:9.3f}")
    swap.close()


if __name__ == "__main__":
    main()
