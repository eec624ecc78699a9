"""Decode steps as CUDA graphs: one graph per padded number of rows and sampling mode.

Invariants: a graph reads and writes only buffers that live as long as the executor, so replaying it is right for any
lengths and any membership. A size without a graph runs the same body eagerly, padded the same way.
Knows nothing of what the body computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

Step = Callable[[int, str], torch.Tensor]


def padded_sizes(maximum: int) -> list[int]:
    """Row counts worth a graph: every power of two up to 16, then steps of 1/8 to 1/4, and `maximum` itself."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128]
    sizes += [*range(160, 257, 32), *range(320, 513, 64), *range(640, 4097, 128)]
    return [*(size for size in sizes if size < maximum), maximum]


class DecodeGraphs:
    """Captures and replays `step(rows, mode)`; off (always eager, unpadded) where there is no CUDA device."""

    def __init__(self, step: Step, max_rows: int, device: torch.device, *, enabled: bool) -> None:
        self._step = step
        self._sizes = padded_sizes(max_rows)
        self._enabled = enabled and device.type == "cuda"
        self._padded = device.type == "cuda"
        self._graphs: dict[tuple[int, str], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: tuple[int, int] | None = None

    @property
    def captured(self) -> int:
        """How many graphs exist."""
        return len(self._graphs)

    def size_for(self, count: int) -> int:
        """The padded size that `count` rows run at."""
        return self._sizes[bisect_left(self._sizes, count)] if self._padded else count

    def run(self, count: int, mode: str) -> torch.Tensor:
        """Run a step of `count` rows: replay its graph, or the body itself where it has none yet.

        Returns what the body returns; of a graph, the same tensor at every replay.
        """
        size = self.size_for(count)
        captured = self._graphs.get((size, mode))
        if captured is None:
            return self._step(size, mode)
        graph, output = captured
        graph.replay()
        return output

    def missing(self, mode: str) -> list[int]:
        """Sizes that have no graph for `mode`, largest first (later graphs then fit the pool of the first)."""
        return [size for size in reversed(self._sizes) if (size, mode) not in self._graphs] if self._enabled else []

    def capture(self, sizes: tuple[int, ...], modes: tuple[str, ...]) -> None:
        """Capture the named sizes (all, where none is named) for each mode.

        The body runs once eagerly first: kernels load lazily, and loading inside a capture fails.
        """
        for mode in modes:
            for size in self.missing(mode):
                if sizes and size not in sizes:
                    continue
                self._step(size, mode)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    output = self._step(size, mode)
                self._pool = self._pool or graph.pool()
                self._graphs[size, mode] = graph, output

    def clear(self) -> None:
        """Drop every graph and the memory of their pool."""
        self._graphs.clear()
        self._pool = None
