"""The plan of the Hopper kernel: every tile in one item, every item in one part, and no part longer than it need be."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tests.kernels.latent_attention.latent_batches import Shape, random_batch

from stoker_kernels.latent_attention.sm90_latent import BLOCK_PARTS, MIN_TILES
from stoker_kernels.latent_attention.triton_plan import latent_plan_kernel


def tiles_of(keys: int) -> int:
    return max(1, -(-keys // 64))


def planned(lengths: list[int], parts: int, device: torch.device) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Items, the bounds of parts, and each row's items as the combining kernel finds them."""
    rows = [(1, keys) for keys in lengths]
    meta = random_batch(Shape(1, 1, 1, 1, 1, page=4096), rows, decodes=len(rows), device=device).meta
    items, shares = meta.workspace.items.fill_(-1), meta.workspace.shares.fill_(-1)
    block = max(16, 1 << (len(rows) - 1).bit_length())
    latent_plan_kernel[(1,)](
        meta.seq_lens, meta.seq_slots, items, shares, len(rows), parts, MIN_TILES,
        BLOCK_ROWS=block, BLOCK_PARTS=BLOCK_PARTS, LAUNCH_PDL=False, num_warps=4,
    )  # fmt: skip
    bounds = shares[: parts + 1, 0].tolist()
    slots = meta.seq_slots.tolist()
    assert all(slots[row] == slot for row, slot in items[: bounds[-1], :2].tolist())
    return items[: bounds[-1], :6].tolist(), bounds, items[: len(rows), 6:].tolist()


def longest_part(lengths: list[int], parts: int, device: torch.device) -> tuple[int, int]:
    """Tiles of the part that has most, after the plan's invariants; and how many rows are cut."""
    items, bounds, of_rows = planned(lengths, parts, device)
    assert bounds[0] == 0
    assert all(low <= high for low, high in itertools.pairwise(bounds))
    at = 0
    for row, keys in enumerate(lengths):
        first, count = of_rows[row]
        assert first == at
        assert count >= 1
        reached = 0
        for item in items[first : first + count]:
            assert item[0] == row
            assert item[4:] == [first, count]
            assert item[2] == reached
            assert item[3] > reached or keys == 0
            assert item[3] % 64 == 0 or item[3] == keys
            reached = item[3]
        assert reached == keys
        at += count
    assert at == len(items) == bounds[-1]
    loads = [sum(tiles_of(end - start) for _, _, start, end, *_ in items[low:high])
             for low, high in itertools.pairwise(bounds)]  # fmt: skip
    return max(loads), sum(count > 1 for _, count in of_rows)


@pytest.mark.parametrize(
    ("lengths", "parts", "longest", "cut"),
    [
        ([4096] * 64, 66, 64, 0),  # rows as they are: cuts would save two tiles of 64
        ([1024] * 256, 66, 64, 0),
        ([4096] * 16, 132, 8, 16),  # eight pieces each
        ([4096], 132, 2, 1),  # no piece is shorter than two tiles
        ([8192] * 150, 132, 146, 129),  # a line, of whose 131 cuts two lie between rows: whole rows would take 256
        ([1], 7, 1, 0),
        ([0, 0, 0], 2, 2, 0),
    ],
)
def test_known_steps(lengths: list[int], parts: int, longest: int, cut: int, device: torch.device) -> None:
    assert longest_part(lengths, parts, device) == (longest, cut)


def test_random_steps_are_near_their_share(device: torch.device) -> None:
    draw = random.Random(11)
    for _ in range(12):
        parts = draw.randrange(1, 140)
        kinds = (lambda: 0, lambda: 64, lambda: draw.randrange(30_000), lambda: draw.randrange(300))
        lengths = [draw.choice(kinds)() for _ in range(draw.randrange(1, 40))]
        longest, _ = longest_part(lengths, parts, device)
        tiles = [tiles_of(keys) for keys in lengths]
        share = max(-(-sum(tiles) // parts), MIN_TILES)
        assert longest <= share + 6
