"""Positions of prompts with images, chunk by chunk, against transformers' of the whole prompt."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from stoker_runtime.executor.images.places import chunk_positions, rows_of, shift_behind
from stoker_runtime.request import Image
from stoker_runtime.scheduler.shown import met, shift_before
from stoker_runtime.step.batch import PrefillChunk


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_positions_of_chunks_are_those_of_the_whole_prompt(merge: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, patch = random.Random(seed), 14
    unit, ids, images, grids = merge * patch, [], [], []
    for _ in range(rng.randint(1, 4)):
        ids.extend([1] * rng.randint(1, 9))
        rows, columns = rng.randint(1, 6), rng.randint(1, 6)
        images.append(
            Image(len(ids), rows * columns, rows * unit, columns * unit, b"", b"", max(rows, columns))
        )
        grids.append([1, rows * merge, columns * merge])
        ids.extend([2] * rows * columns)
    ids.extend([1] * rng.randint(1, 9))
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge, tokens_per_second=2)),
        get_vision_position_ids=lambda *given, **named: Qwen2_5_VLModel.get_vision_position_ids(None, *given, **named),
    )
    kinds = torch.tensor([ids]) - 1
    expected, deltas = Qwen2_5_VLModel.get_rope_index(
        model, torch.tensor([ids]), kinds, image_grid_thw=torch.tensor(grids)
    )
    start, found = 0, []
    while start < len(ids):
        stop = rng.randint(start + 1, len(ids))
        shown, shift = met(images, start, stop), shift_before(images, start)
        chunk = PrefillChunk(0, start, tuple(ids[start:stop]), False, images=shown, shift=shift)
        found.append(chunk_positions(chunk, unit))
        if stop == len(ids) or ids[stop] == 1:
            assert shift_behind(chunk) == shift_before(images, stop)
        first = rng.randrange(100)
        for each in shown:
            rows, tokens = rows_of(chunk, each, first)
            assert len(rows) == len(tokens)
            assert [at - first + start - each.at for at in rows] == list(tokens)
        start = stop
    assert np.array_equal(np.concatenate(found, axis=1), expected[:, 0].numpy())
    assert shift_before(images, len(ids)) == int(deltas.flatten()[0])
