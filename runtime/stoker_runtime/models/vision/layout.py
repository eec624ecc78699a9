"""In which order patches of images are computed, where each lies in its image, and which see each other.

Invariants: pure, torch-free. Images lie end to end; within one, patches go block by block, rows of blocks first, and
within a block by rows, so that what becomes one token lies together. Where layers see within windows, blocks go window
by window, for all layers; `returning` brings tokens back into the order of their image.
Source: the published code of Qwen2-VL, Qwen2.5-VL (windows) and Qwen3-VL (interpolation).
Knows nothing of pixels and of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int]
"""(rows, columns) of patches."""


class Layout(NamedTuple):
    """Of `T` patches: `places [T, 2]`, a patch's row and column in its image; `starts`, where images begin, and where
    all end; `windows` likewise of windows. `order [T / merge²]`: the block that is computed at each place; `returning`
    is its inverse. The last three are None where there are no windows.
    """

    places: NDArray[np.int32]
    starts: NDArray[np.int32]
    windows: NDArray[np.int32] | None
    order: NDArray[np.int64] | None
    returning: NDArray[np.int64] | None


def lay_out(grids: Sequence[Grid], merge: int, window: int) -> Layout:
    """The layout of images of such grids, with blocks of `merge`² patches and windows of `window`² blocks (0: none)."""
    places = np.concatenate([block_places(grid, merge) for grid in grids])
    starts = _ends([rows * columns for rows, columns in grids])
    if not window:
        return Layout(places, starts, None, None, None)
    orders, sizes, begun = [], [], 0
    for rows, columns in grids:
        order, blocks = _in_windows(rows // merge, columns // merge, window)
        orders.append(order + begun)
        sizes.append(blocks * merge**2)
        begun += len(order)
    order = np.concatenate(orders)
    places = places.reshape(-1, merge**2, 2)[order].reshape(-1, 2)
    return Layout(places, starts, _ends(np.concatenate(sizes)), order, np.argsort(order))


def block_places(grid: Grid, merge: int) -> NDArray[np.int32]:
    """(row, column) of each patch of an image, block by block: `[rows · columns, 2]`."""
    rows, columns = grid
    at = np.moveaxis(np.indices(grid, dtype=np.int32), 0, -1)
    blocks = at.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
    return np.ascontiguousarray(blocks.reshape(-1, 2))


def _in_windows(rows: int, columns: int, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks of an image window by window, within one by rows; and how many each has: those at the ends are smaller."""
    across = -(-columns // window)
    windows = (np.arange(rows) // window * across)[:, None] + np.arange(columns) // window
    return np.argsort(windows, axis=None, kind="stable"), np.bincount(windows.ravel())


def _ends(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


class Corners(NamedTuple):
    """Rows of a table of `side`² positions whose sum, so weighted, is a patch's: `ids [T, 4]`, `weights [T, 4]`."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


def stretch(grids: Sequence[Grid], merge: int, side: int) -> Corners:
    """A square of `side`² positions stretched to each image, the corners onto its corners: bilinear."""
    found = [_stretched(grid, merge, side) for grid in grids]
    return Corners(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _stretched(grid: Grid, merge: int, side: int) -> Corners:
    rows, columns = block_places(grid, merge).T
    (top, bottom, down), (left, right, along) = (_between(size, side) for size in grid)
    ids, weights = [], []
    for row, row_weight in ((top, 1 - down), (bottom, down)):
        for column, column_weight in ((left, 1 - along), (right, along)):
            ids.append(row[rows] * side + column[columns])
            weights.append(row_weight[rows] * column_weight[columns])
    return Corners(np.stack(ids, axis=1), np.stack(weights, axis=1))


def _between(size: int, side: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Of each of `size` patches: the positions before and behind it, and how far it lies on the way."""
    at = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(at)
    before = floor.astype(np.int32)
    return before, np.minimum(before + 1, side - 1), at - floor
