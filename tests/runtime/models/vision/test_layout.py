"""The order of patches, their windows and stretched positions against transformers' functions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker_runtime.models.vision.layout import lay_out, stretch

blocks = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


def grids_of(found: list[tuple[int, int]], merge: int) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Grids of patches, as these functions and as transformers' take them."""
    grids = [(rows * merge, columns * merge) for rows, columns in found]
    return grids, torch.tensor([(1, *grid) for grid in grids])


@given(blocks, st.integers(1, 3))
def test_patches_go_block_by_block(found: list[tuple[int, int]], merge: int) -> None:
    from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

    grids, grid_thw = grids_of(found, merge)
    layout = lay_out(grids, merge, 0)
    assert layout.windows is layout.order is layout.returning is None
    np.testing.assert_array_equal(layout.places, get_vision_position_ids(grid_thw, merge))
    np.testing.assert_array_equal(layout.starts, get_vision_cu_seqlens(grid_thw))


@given(blocks, st.integers(1, 3), st.integers(1, 5))
def test_blocks_go_window_by_window(found: list[tuple[int, int]], merge: int, window: int) -> None:
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    grids, grid_thw = grids_of(found, merge)
    layout = lay_out(grids, merge, window)
    order, windows = get_vision_window_index(grid_thw, merge, window_size=window * merge * 7, patch_size=7)
    assert layout.order is not None
    assert layout.returning is not None
    np.testing.assert_array_equal(layout.order, order)
    np.testing.assert_array_equal(layout.windows, windows)
    np.testing.assert_array_equal(layout.order[layout.returning], np.arange(len(order)))
    places = get_vision_position_ids(grid_thw, merge).unflatten(0, (-1, merge**2))[order].flatten(0, 1)
    np.testing.assert_array_equal(layout.places, places)
    # No window reaches from one image into another.
    assert set(layout.starts.tolist()) <= set(windows.tolist())
    assert all(start < end for start, end in pairwise(windows.tolist()))


@given(blocks, st.integers(1, 3), st.integers(1, 12))
def test_positions_are_stretched_to_the_corners(found: list[tuple[int, int]], merge: int, side: int) -> None:
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    grids, grid_thw = grids_of(found, merge)
    ids, weights = get_vision_interpolation_indices_and_weights(
        grid_thw, side, align_corners=True, spatial_merge_size=merge
    )
    corners = stretch(grids, merge, side)
    assert corners.weights.dtype == np.float32
    np.testing.assert_array_equal(corners.ids, ids)
    np.testing.assert_allclose(corners.weights, weights, atol=1e-6)


@pytest.mark.parametrize("window", [0, 2])
def test_types_are_those_that_kernels_read(window: int) -> None:
    layout = lay_out([(4, 6)], 2, window)
    assert layout.places.dtype == layout.starts.dtype == np.int32
    assert layout.windows is None or layout.windows.dtype == np.int32
