"""Memory of weights on a CPU: asked for in large pages before anything is written there."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from stoker_runtime.weights.cpu_order import LARGE_PAGE, in_large_pages


@pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
    reason="this system has no large pages",
)
def test_whole_large_pages_within_the_memory_are_asked_for() -> None:
    storage = torch.empty(random.randint(3 * LARGE_PAGE, 9 * LARGE_PAGE), dtype=torch.uint8)
    assert in_large_pages(storage) is storage
    first = -(-storage.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    assert "hg" in flags_at(first)
    assert "hg" in flags_at((storage.data_ptr() + storage.nbytes) // LARGE_PAGE * LARGE_PAGE - 1)
    storage.fill_(7)
    assert int(storage.long().sum()) == 7 * storage.numel()


@pytest.mark.parametrize("size", [0, 1, LARGE_PAGE - 1])
def test_memory_without_a_whole_one_stays_as_it_is(size: int) -> None:
    storage = torch.empty(size, dtype=torch.uint8)
    assert in_large_pages(storage) is storage


def flags_at(address: int) -> list[str]:
    """What the system says of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(each, 16) for each in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    return []
