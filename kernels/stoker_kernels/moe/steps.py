"""The steps in which a row of experts in four bits is read, and where in a step's words each column stands.

A row of K columns is read in steps: of 256 columns as long as there are as many, then of 128, 64 and 32. A step of C
columns is C / 8 words of 32 bits; of a word's eight codes the i-th is of column i · C / 8 + p, p the word's place. So
one code place of a step's words is C / 8 columns that follow each other, and those of several places side by side, too.
Numbers that share a scale in blocks of 16 are read in steps of half as many columns, down to 16; so a code place of a
step of the largest size is one block either way.
Invariants: pure. A step begins at a multiple of its size, so a block is never parted by the end of a step.
Knows nothing of what a code means.
"""

from __future__ import annotations

BLOCK = 32
"""Columns that a row has whole multiples of, unless its blocks are smaller."""
PLACES = 8


def steps_of(columns: int, block: int = BLOCK) -> list[tuple[int, int]]:
    """The first column of each step of a row, and how many it has. Raises ValueError for no whole blocks."""
    if columns % block or columns < block:
        raise ValueError(f"{columns} columns are no whole blocks of {block}")
    whole = block * PLACES
    found = [(start, whole) for start in range(0, columns - whole + 1, whole)]
    start = len(found) * whole
    for size in (4 * block, 2 * block, block):
        if (columns - start) & size:
            found.append((start, size))
            start += size
    return found


def runs_of(columns: int, block: int = BLOCK) -> list[tuple[int, int, int]]:
    """The steps of a row, those of a size as one: first column, how many steps, and the words of each."""
    runs: dict[int, list[int]] = {}
    for start, size in steps_of(columns, block):
        runs.setdefault(size, []).append(start)
    return [(starts[0], len(starts), size // PLACES) for size, starts in runs.items()]
