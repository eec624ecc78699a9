"""Padded shapes hold every batch, and the packed upload says what the batch says."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stoker_runtime.executor.graphs.step_shape import (
    GRAPH_PREFILLS,
    GRAPH_TOKENS,
    ShapeTable,
    StepShape,
    pack_ragged,
    sampled_rows,
)
from stoker_runtime.step.batch import Batch, PrefillChunk


def test_every_batch_fits_its_shape() -> None:
    table = ShapeTable(1024, 8192, 7_000_000_000, padded=True)
    generator = random.Random(0)
    graphed = 0
    for _ in range(2000):
        decodes, prefills = generator.randrange(1017), generator.randrange(1, 8)
        tokens = generator.randrange(prefills, 800)
        shape, graph = table.ragged(decodes, prefills, tokens, "greedy")
        graphed += graph
        assert shape.decodes >= decodes
        assert shape.prefills >= prefills
        assert shape.tokens >= tokens
        assert shape.rows <= 1024
        assert graph or shape == StepShape(decodes, prefills, tokens, "greedy")
        assert table.decode(max(decodes, 1), "greedy").rows >= decodes
    assert graphed > 400


def test_a_padded_step_fits_a_small_budget_of_tokens() -> None:
    table = ShapeTable(16, 256, 500_000_000, padded=True)
    shapes = [table.ragged(decodes, 1, tokens, "greedy") for decodes in range(9) for tokens in range(1, 257 - decodes)]
    assert all(shape.total_tokens <= 256 for shape, _ in shapes)
    assert any(graph for _, graph in shapes)


@pytest.mark.parametrize(("rows", "tokens", "parameters"), [(1024, 8192, 600_000_000), (64, 96, 10**9), (4, 64, 1)])
def test_the_largest_graph_is_the_largest(rows: int, tokens: int, parameters: int) -> None:
    table = ShapeTable(rows, tokens, parameters, padded=True)
    graphed = [table.decode(count, "greedy").total_tokens for count in range(1, rows + 1)]
    for decodes in range(rows):
        for chunk in GRAPH_TOKENS:
            shape, graph = table.ragged(decodes, 1, chunk, "greedy")
            if graph and decodes + chunk <= tokens:
                graphed.append(shape.total_tokens)
    assert max(graphed) <= table.most_graphed <= max(graphed) + GRAPH_PREFILLS


@pytest.mark.parametrize(("rows", "most", "verified"), [(48, 5, 256), (7, 11, 84), (300, 3, 256), (33, 16, 90)])
def test_verifications_have_one_shape_a_size_of_batch_and_number_of_drafts(rows: int, most: int, verified: int) -> None:
    """Padded as decodes are, each row k + 1 tokens, never beyond what a step verifies; those ahead of use are few."""
    table = ShapeTable(rows, 4096, 10**9, padded=True, most_drafts=most, verify_tokens=verified)
    found: dict[tuple[int, int], int] = {}
    for drafts in range(1, most + 1):
        for count in range(1, min(rows, verified // (drafts + 1)) + 1):
            shape = table.verify(count, drafts, "sample")
            assert (shape.drafts, shape.prefills, shape.tokens) == (drafts, 0, 0)
            assert count <= shape.rows <= table.decode(count, "sample").rows
            assert shape.total_tokens == shape.rows * (drafts + 1) <= verified <= table.most_graphed
            found[shape.rows, drafts] = found.get((shape.rows, drafts), 0) + 1
    assert len(found) < sum(found.values()), "each count has a graph of its own"
    ahead = [shape for shape in table.planned(("greedy",)) if shape.drafts]
    assert {(shape.rows, shape.drafts) for shape in ahead} <= found.keys()
    assert {shape.drafts for shape in ahead} == {most}
    assert not [shape for shape in ShapeTable(rows, 4096, 10**9, padded=True).planned(("greedy",)) if shape.drafts]


def test_large_models_graph_short_prefill_only() -> None:
    large = ShapeTable(64, 8192, 70_000_000_000, padded=True).ragged(0, 1, 512, "greedy")
    small = ShapeTable(64, 8192, 500_000_000, padded=True).ragged(0, 1, 512, "greedy")
    assert not large[1]
    assert small[1]


def test_without_padding_shapes_are_exact() -> None:
    table = ShapeTable(64, 512, 1_000_000, padded=False)
    assert table.decode(5, "greedy") == StepShape(5, 0, 0, "greedy")
    assert table.ragged(3, 2, 17, "sample") == (StepShape(3, 2, 17, "sample"), False)


def test_the_upload_of_a_padded_step() -> None:
    batch = Batch(1, decodes=(4, 2), prefills=(PrefillChunk(7, 16, (1, 2, 3), False), PrefillChunk(5, 0, (9,), True)))
    shape = StepShape(4, GRAPH_PREFILLS, 16, "greedy")
    packed = pack_ragged(batch, shape)
    rows = shape.rows
    query_start = packed[rows : 2 * rows + 1]
    assert packed[:6].tolist() == [4, 2, -1, -1, 7, 5]
    assert (packed[6:rows] == -1).all()
    assert query_start[:7].tolist() == [0, 1, 2, 3, 4, 7, 8]
    assert (query_start[6:] == 8).all()
    assert packed[2 * rows + 1 + 4] == 16
    ids, sampled_slots = packed[3 * rows + 1 : -rows], packed[-rows:]
    assert sampled_slots[:6].tolist() == [4, 2, -1, -1, -1, 5]
    assert (sampled_slots[6:] == -1).all()
    assert ids[4:8].tolist() == [1, 2, 3, 9]
    assert len(ids) == shape.total_tokens
    assert packed.dtype == np.int32
    assert sampled_rows(batch, shape) == [0, 1, 5]
