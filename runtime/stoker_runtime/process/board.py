"""The numbers that the API processes of one server share: a row of cells for each, in memory that all of them map.

Invariants: a process writes its own row only, without locks: a cell is eight aligned bytes, which are written at once.
Whoever reads adds up the rows, so every process tells of the whole server. A process that replaces a dead one goes on
with the dead one's row, so counters never fall.
Knows nothing of what the cells mean, but for those that the life of a server needs: WARM, ACTIVE, LAST and CONNECTIONS.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from math import ceil

CELLS = 1024
ROW_BYTES = CELLS * 8
WARM = 0
"""1 once this process has answered its warm-up."""
ACTIVE = 1
"""Client requests under way in this process."""
LAST = 2
"""When a client request last began or ended in this process, or it became warm, by the monotonic clock; 0 = never."""
CONNECTIONS = 3
"""Open connections of this process, and one more; 0 while it accepts none."""
ACCEPTED = 4
"""Connections that came to this process in turns: where two have as many open, the next is whose turn it is."""
SEEN = 5
"""When this process last said how many connections it has, by the monotonic clock."""
FIRST_FREE = 6
ABSENT_SECONDS = 0.5
"""Without a word: it hangs, and takes no connection."""


class Board:
    """One process's view. `cells` is its own row."""

    def __init__(self, rows: int = 1, row: int = 0, memory: bytearray | mmap.mmap | None = None) -> None:
        """Without `memory` nothing is shared."""
        view = memoryview(bytearray(rows * ROW_BYTES) if memory is None else memory).cast("d")
        self._rows = [view[at * CELLS : (at + 1) * CELLS] for at in range(rows)]
        self.cells = self._rows[row]
        self._free = FIRST_FREE

    @classmethod
    def mapped(cls, descriptor: int, rows: int, row: int) -> Board:
        """The board in the file `descriptor`, which `create` made."""
        return cls(rows, row, mmap.mmap(descriptor, rows * ROW_BYTES))

    @classmethod
    def create(cls, rows: int) -> tuple[int, Board]:
        """A file without a name that holds a board of zeros, as a descriptor, and the board."""
        descriptor, name = tempfile.mkstemp(prefix="stoker-")
        os.unlink(name)
        # Its pages are taken now: one that finds a full disk at its first write would end the process by a signal.
        os.posix_fallocate(descriptor, 0, rows * ROW_BYTES)
        return descriptor, cls.mapped(descriptor, rows, 0)

    def take(self, count: int) -> int:
        """The first of `count` cells that nobody has yet. In every process the same calls give the same cells."""
        first, self._free = self._free, self._free + count
        if self._free > CELLS:
            raise ValueError(f"a row of the board has {CELLS} cells, too few for {self._free}")
        return first

    def total(self, at: int) -> float:
        """The sum of a cell over all processes."""
        return sum(row[at] for row in self._rows)

    def idle_seconds(self, now: float) -> float:
        """Seconds since a request of the server last began or ended, or it became warm; 0 while one is under way or
        before. `now` is by the monotonic clock, which all processes of a machine share.
        """
        latest = max(row[LAST] for row in self._rows)
        return max(0.0, now - latest) if latest and not self.total(ACTIVE) else 0.0

    @property
    def all_warm(self) -> bool:
        """Whether every process has answered its warm-up."""
        return all(row[WARM] for row in self._rows)

    def accept(self, connections: int | None, turns: int, now: float) -> None:
        """This process accepts connections, has so many open, and had so many turns; None: it accepts none."""
        self.cells[CONNECTIONS] = 0 if connections is None else connections + 1
        self.cells[ACCEPTED] = turns
        self.cells[SEEN] = now

    @property
    def most_turns(self) -> int:
        """The turns of the process that had most, where one that begins stands."""
        return int(max(row[ACCEPTED] for row in self._rows))

    def part_of(self, waiting: int, now: float) -> int:
        """How many of `waiting` connections are this process's: of one, that one if of all that accept connections none
        has fewer, nor as many after fewer turns; of several, those that make its share of all connections whole.
        """
        there = self._there(now)
        mine = (self.cells[CONNECTIONS], self.cells[ACCEPTED])
        if waiting == 1:
            return int(all(mine <= (row[CONNECTIONS], row[ACCEPTED]) for row in there))
        # What stands in a row is one more than the connections.
        share = ceil((sum(row[CONNECTIONS] for row in there) + waiting) / len(there))
        return min(waiting, max(0, share - int(mine[0])))

    def even_part(self, waiting: int, now: float) -> int:
        """How many of `waiting` connections each process has where all take as many, rounded up."""
        return ceil(waiting / len(self._there(now)))

    def _there(self, now: float) -> list[memoryview[float]]:
        """The rows of this process and of all others that accept connections."""
        rows, mine = self._rows, self.cells
        return [row for row in rows if row is mine or (row[CONNECTIONS] and now - row[SEEN] < ABSENT_SECONDS)]

    def bury(self, row: int) -> None:
        """The process of `row` died: nothing is under way in it any more."""
        self._rows[row][ACTIVE] = self._rows[row][CONNECTIONS] = 0.0
