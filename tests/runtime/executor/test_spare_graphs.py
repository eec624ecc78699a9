"""Graphs that nobody planned are bounded, go to what runs most, and are the same on every rank."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from stoker_runtime.executor.graphs.spare_graphs import HALVED_AFTER, SpareGraphs
from stoker_runtime.executor.graphs.step_shape import StepShape


class Graphs:
    """What `StepGraphs` does with the answers, without a device."""

    def __init__(self, most: int) -> None:
        self.spare = SpareGraphs(most)
        self.standing: set[StepShape] = set()
        self.captures = 0
        self.replays: Counter[StepShape] = Counter()

    def run(self, shape: StepShape) -> None:
        self.spare.ran(shape)
        if shape in self.standing:
            self.replays[shape] += 1
            return
        admitted, leaver = self.spare.admit(shape)
        if leaver is not None:
            self.standing.remove(leaver)
        if admitted:
            self.standing.add(shape)
            self.captures += 1


def shape_of(number: int) -> StepShape:
    return StepShape(number % 37, 8, 16 * (number // 37 + 1), ("greedy", "masked")[number % 2])


def test_a_shape_that_comes_again_has_a_graph_while_there_is_room() -> None:
    graphs = Graphs(3)
    for number in (1, 2, 1, 3, 2):
        graphs.run(shape_of(number))
    assert graphs.standing == {shape_of(1), shape_of(2)}


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic_keeps_the_bound_and_few_captures(seed: int) -> None:
    """Shapes by a heavy tail, as mixed steps have them: the frequent ones stand, few graphs are made for nothing."""
    draw, most, steps = random.Random(seed), 20 + seed, 30_000
    graphs = Graphs(most)
    for _ in range(steps):
        graphs.run(shape_of(min(int(draw.paretovariate(0.6)), 900)))
        assert len(graphs.standing) <= most
    frequent = {shape_of(number) for number in range(1, 8)}
    assert frequent <= graphs.standing
    assert graphs.captures < steps / 50
    assert graphs.replays.total() > 0.75 * steps


def test_another_kind_of_traffic_takes_the_places() -> None:
    graphs = Graphs(10)
    for _ in range(50):
        for number in range(10):
            graphs.run(shape_of(number))
    for _ in range(2 * HALVED_AFTER // 10):
        for number in range(100, 110):
            graphs.run(shape_of(number))
    assert graphs.standing == {shape_of(number) for number in range(100, 110)}


def test_ranks_that_run_alike_choose_alike() -> None:
    draw = random.Random(5)
    shapes = [shape_of(min(int(draw.paretovariate(0.4)), 900)) for _ in range(5_000)]
    one, other = Graphs(9), Graphs(9)
    for shape in shapes:
        one.run(shape)
    for shape in shapes:
        other.run(StepShape(shape.decodes, shape.prefills, shape.tokens, shape.mode))
    assert one.standing == other.standing
    assert one.captures == other.captures > 9


def test_what_is_dropped_is_made_again() -> None:
    graphs = Graphs(2)
    for number in (1, 1, 2, 2):
        graphs.run(shape_of(number))
    graphs.spare.clear()
    graphs.standing.clear()
    graphs.run(shape_of(1))
    assert graphs.standing == {shape_of(1)}
