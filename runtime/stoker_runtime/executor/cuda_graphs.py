"""Steps as CUDA graphs: one graph per padded shape.

Invariants: a graph reads and writes only buffers that live as long as the executor, so replaying it is right for any
lengths and any membership. A shape without a graph runs the same body eagerly, padded the same way. All graphs share
one memory pool, which the first one fills and none keeps a part of: they never run at the same time. Beside those that
are prepared a bounded number stands (`graphs/spare_graphs.py`).
Knows nothing of what the body computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker_runtime.executor.device import hold
from stoker_runtime.executor.graphs.spare_graphs import SPARE_GRAPHS, SpareGraphs
from stoker_runtime.executor.graphs.step_shape import StepShape

Step = Callable[[StepShape], torch.Tensor]


class StepGraphs:
    """Captures and replays `step(shape)`; always eager where there is no CUDA device or graphs are off.

    The body runs once eagerly before it is captured, because kernels load lazily and loading fails inside a capture.
    """

    def __init__(
        self, step: Step, device: torch.device, pool_bytes: int, *, enabled: bool, spare: int = SPARE_GRAPHS
    ) -> None:
        """`step` returns a view of a buffer that rests; its activations take up to `pool_bytes`.

        `spare` graphs stand beside those that are prepared.
        """
        self._step = step
        self._device = device
        self._pool_bytes = pool_bytes
        self._enabled = enabled and device.type == "cuda"
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._warm: set[StepShape] = set()
        self._spare = SpareGraphs(spare)
        self._stream = torch.cuda.Stream(device) if self._enabled else None

    @property
    def captured(self) -> int:
        """How many graphs exist."""
        return len(self._graphs)

    def run(self, shape: StepShape) -> torch.Tensor:
        """Run a step: replay its graph, or the body itself where it has none; a shape that comes again is captured.

        Returns what the body returns; of a graph, the same tensor at every replay.
        """
        if not self._enabled:
            return self._step(shape)
        self._spare.ran(shape)
        if shape not in self._graphs:
            admitted, leaver = self._spare.admit(shape) if shape in self._warm else (False, None)
            if leaver is not None:
                torch.cuda.current_stream().synchronize()  # it may be running
                del self._graphs[leaver]
            if not admitted:
                output = self._step(shape)
                self._warm.add(shape)
                return output
            self._capture(shape)
        graph, output = self._graphs[shape]
        graph.replay()
        return output

    def missing(self, shapes: list[StepShape]) -> list[StepShape]:
        """Those of `shapes` that have no graph."""
        return [shape for shape in shapes if shape not in self._graphs] if self._enabled else []

    def prepare(self, shape: StepShape) -> None:
        """Capture one graph ahead of its use. The body runs once: the caller has made it harmless."""
        self.warm(shape)
        self._capture(shape)

    def warm(self, shape: StepShape) -> None:
        """Run the body once, so that its kernels are loaded."""
        if shape not in self._warm:
            self._step(shape)
            self._warm.add(shape)

    def _capture(self, shape: StepShape) -> None:
        # By hand: `torch.cuda.graph` synchronises the device and collects garbage, tens of milliseconds a graph.
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        pool = next((known.pool() for known, _ in self._graphs.values()), None)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                if pool is None:
                    hold(self._pool_bytes, self._device)
                output = self._step(shape)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs[shape] = graph, output

    def clear(self) -> None:
        """Drop every graph and the memory of their pool."""
        self._graphs.clear()
        self._spare.clear()
