"""Page copies against their reference, bit by bit."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import pages
from stoker_kernels.pages import reference


@pytest.mark.parametrize(("dtype", "words"), [(torch.int64, 48), (torch.int64, 2500), (torch.uint8, 999)])
@pytest.mark.parametrize("transposed", [False, True])
def test_copy_pages_matches(transposed: bool, dtype: torch.dtype, words: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(words)

    def draw(count: int) -> torch.Tensor:
        shape = (6, count, words) if transposed else (count, 6, words)
        drawn = torch.randint(0, 200, shape, generator=generator).to(dtype)
        return drawn.transpose(0, 1) if transposed else drawn

    source, target = draw(20), draw(9)
    # As a slice of a longer list: it starts where it starts.
    pairs = torch.tensor([(0, 0), (17, 8), (3, 0), (3, 4), (9, 2)], dtype=torch.int32)[1:]
    expected = target.clone()
    reference.copy_pages(source, expected, pairs)
    there = target.to(device)
    pages.copy_pages(source.to(device), there, pairs.to(device))
    assert torch.equal(there.cpu(), expected)
    assert torch.equal(expected[[0, 2, 4, 8]], source[[3, 9, 3, 17]])


def test_pages_are_copied_within_one_arena(device: torch.device) -> None:
    arena = torch.arange(8 * 3 * 32).view(3, 8, 32).to(device)
    before = arena.cpu().clone()
    words = arena.transpose(0, 1)
    pages.copy_pages(words, words, torch.tensor([(1, 5), (2, 0)], dtype=torch.int32, device=device))
    before[:, [5, 0]] = before[:, [1, 2]]
    assert torch.equal(arena.cpu(), before)


def test_no_pairs_copy_nothing(device: torch.device) -> None:
    arena = torch.ones((4, 2, 16), dtype=torch.int64, device=device)
    pages.copy_pages(arena, arena, torch.empty((0, 2), dtype=torch.int32, device=device))
    assert bool((arena == 1).all())
