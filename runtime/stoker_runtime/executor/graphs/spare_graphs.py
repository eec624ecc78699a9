"""Which shapes that nobody planned a CUDA graph for are worth one, where only so many may stand.

A graph takes 1.5 to 2 MiB of the host's memory and 0.7 of the device's with 28 layers, and its capture 35 ms; steps
have a thousand shapes. So those that ran most of late have graphs, and one that comes has to have run clearly more
than the one that goes.

Invariants: pure; bounded; the same runs give the same answers, so that ranks capture alike.
Knows nothing of CUDA.
"""

from __future__ import annotations

from collections import Counter

from stoker_runtime.executor.graphs.step_shape import ShapeTable, StepShape
from stoker_runtime.sampling.modes import GREEDY, SAMPLE

# Beside those that are planned. The decodes and mixed steps of one way of sampling are some 150 shapes.
SPARE_GRAPHS = 128
# What a captured graph takes on the device for each layer: 24 KiB with 0.6B, 27 with 7B.
GRAPH_LAYER_BYTES = 28 * 1024
# The ways of sampling for which graphs are prepared.
PREPARED_MODES = (GREEDY, SAMPLE)
# Counts are halved after so many steps: what ran a minute ago says little of now.
HALVED_AFTER = 4096
# Runs that a new shape must have more than twice those of the one it takes the place of: its capture pays for itself.
MORE_RUNS = 4


def most_graphs(shapes: ShapeTable, *, adapters: bool) -> int:
    """How many graphs may stand at a time."""
    return len(shapes.planned(PREPARED_MODES, adapters=adapters)) + SPARE_GRAPHS


class SpareGraphs:
    """Counts runs of shapes, and chooses which of them hold one of `most` graphs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._runs: Counter[StepShape] = Counter()
        self._counted = 0
        self._holders: dict[StepShape, None] = {}  # in the order in which they came: of equals the oldest goes

    def ran(self, shape: StepShape) -> None:
        """Count a step of `shape`."""
        self._runs[shape] += 1
        self._counted += 1
        if self._counted % HALVED_AFTER == 0:
            self._runs = Counter({each: runs // 2 for each, runs in self._runs.items() if runs > 1})

    def admit(self, shape: StepShape) -> tuple[bool, StepShape | None]:
        """Whether `shape` is to have a graph from its next step on, and whose graph goes for it.

        The second run is told from the first: many shapes come once.
        """
        if self._runs[shape] < 2:
            return False, None
        leaver = None
        if len(self._holders) >= self._most:
            leaver = min(self._holders, key=self._runs.__getitem__)
            if self._runs[shape] <= 2 * self._runs[leaver] + MORE_RUNS:
                return False, None
            del self._holders[leaver]
        self._holders[shape] = None
        return True, leaver

    def clear(self) -> None:
        """No shape has a graph any more; what ran is remembered."""
        self._holders.clear()
