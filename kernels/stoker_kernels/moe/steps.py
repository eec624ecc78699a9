"""The steps in which a row of experts in four bits is read, and where in a step's words each column stands.

A row of K columns is read in steps: of 256 columns as long as there are as many, then of 128, 64 and 32. A step of C
columns is C / 8 words of 32 bits; of a word's eight codes the i-th is of column i · C / 8 + p, p the word's place. So
one code place of a step's words is C / 8 columns that follow each other, and those of several places side by side, too.
Invariants: pure. A step begins at a multiple of its size, so a run of 32 columns that begins at a multiple of 32 is
never parted by the end of a step.
Knows nothing of what a code means.
"""

from __future__ import annotations

BLOCK = 32
"""Columns that a row has whole multiples of."""
STEP = 256
PLACES = 8


def steps_of(columns: int) -> list[tuple[int, int]]:
    """The first column of each step of a row, and how many it has. Raises ValueError for no whole blocks."""
    if columns % BLOCK or columns < BLOCK:
        raise ValueError(f"{columns} columns are no whole blocks of {BLOCK}")
    found = [(start, STEP) for start in range(0, columns - STEP + 1, STEP)]
    start = len(found) * STEP
    for size in (128, 64, 32):
        if (columns - start) & size:
            found.append((start, size))
            start += size
    return found


def runs_of(columns: int) -> list[tuple[int, int]]:
    """The steps of a row, those of a size as one: first column and size."""
    return list({size: (start, size) for start, size in reversed(steps_of(columns))}.values())


def shape_of(columns: int, start: int, size: int) -> tuple[int, int]:
    """How many steps of this size a row has from `start` on, and the words of each."""
    return ((columns - start) // size if size == STEP else 1), size // PLACES
