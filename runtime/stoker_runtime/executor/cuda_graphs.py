"""Decode steps as CUDA graphs: one graph per padded number of rows and sampling mode.

Invariants: a graph reads and writes only buffers that live as long as the executor, so replaying it is right for any
lengths and any membership. A size without a graph runs the same body eagerly, padded the same way. All graphs share one
memory pool: they never run at the same time.
Knows nothing of what the body computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

Step = Callable[[int, str], torch.Tensor]
Key = tuple[int, str]


def padded_sizes(maximum: int) -> list[int]:
    """Row counts worth a graph: powers of two up to 16, then steps of an eighth to a quarter, and `maximum` itself."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128]
    sizes += [*range(160, 257, 32), *range(320, 513, 64), *range(640, 4097, 128)]
    return [*(size for size in sizes if size < maximum), maximum]


class DecodeGraphs:
    """Captures and replays `step(rows, mode)`; always eager and unpadded where there is no CUDA device.

    The body runs once eagerly before it is captured, because kernels load lazily and loading fails inside a capture.
    `quiesce` is called before each capture and has to make the body harmless: it must change no sequence's state.
    """

    def __init__(
        self, step: Step, quiesce: Callable[[], None], max_rows: int, device: torch.device, *, enabled: bool
    ) -> None:
        self._step = step
        self._quiesce = quiesce
        self._sizes = padded_sizes(max_rows)
        self._padded = device.type == "cuda"
        self._enabled = enabled and self._padded
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._warm: set[Key] = set()
        self._stream = torch.cuda.Stream(device) if self._enabled else None

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
        key = (self.size_for(count), mode)
        captured = self._graphs.get(key)
        if captured is None:
            self._warm.add(key)
            return self._step(*key)
        graph, output = captured
        graph.replay()
        return output

    def missing(self, modes: tuple[str, ...]) -> list[Key]:
        """What has no graph yet, largest first: later graphs then fit the pool of the first."""
        if not self._enabled:
            return []
        keys = [(size, mode) for mode in modes for size in reversed(self._sizes)]
        return [key for key in keys if key not in self._graphs]

    def capture(self, key: Key) -> None:
        """Capture one graph. Steps in flight are not disturbed; the next step must upload its membership anew."""
        assert self._stream is not None
        self._quiesce()
        if key not in self._warm:
            self._step(*key)
            self._warm.add(key)
        graph = torch.cuda.CUDAGraph()
        pool = next((known.pool() for known, _ in self._graphs.values()), None)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = self._step(*key)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs[key] = graph, output

    def clear(self) -> None:
        """Drop every graph and the memory of their pool."""
        self._graphs.clear()
