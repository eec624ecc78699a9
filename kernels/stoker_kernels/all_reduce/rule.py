"""Which kernel adds up a message, by its size and the number of ranks; how rows are shared out; the memory this takes.

One shot sends every word to every rank, two shots send it twice at most, with one more wait. Beyond `largest` NCCL's
rings are as fast, and take no memory a rank. A prompt's rows, of which there are many, are shared out: each rank owns a
part of them, which it sums and norms while products of other rows run.
Invariants: the choice depends on the shape alone, so all ranks make the same one.
Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LARGEST_OF_TWO, LARGEST_OF_MORE = 8 << 20, 4 << 20
ONE_SHOT = 512 << 10  # of more than two ranks; two send no less in two shots
MOST_RANKS = 8
SLOTS = 3
VECTOR_BYTES = 16
MOST_CTAS = 128  # of more threads than half an SM has; all of which an H100 or H200 holds at once
HALF_AN_SM = 512
MOST_VECTORS = 2048  # of a row
# Rows of a share: fewer leave a product's tiles half empty, and a copy's start costs what it hides.
LEAST_SHARE = 768
SHARE_STEP = 128  # rows of a tile


def largest(ranks: int) -> int:
    """Bytes of the largest message that the kernels take."""
    return LARGEST_OF_TWO if ranks == 2 else LARGEST_OF_MORE


def shots_for(rows: int, row_bytes: int, ranks: int) -> int | None:
    """1 or 2; None where the kernels do not take a message of `rows` rows."""
    size = rows * row_bytes
    if size == 0 or size > largest(ranks) or not fits_vectors(row_bytes):
        return None
    return 1 if ranks == 2 or size <= ONE_SHOT else 2


def most_ctas(threads: int) -> int:
    """CTAs of so many threads that a GPU holds at once."""
    return MOST_CTAS if threads > HALF_AN_SM else 2 * MOST_CTAS


def fits_vectors(row_bytes: int) -> bool:
    """Whether a CTA can hold a row."""
    return row_bytes % VECTOR_BYTES == 0 and row_bytes // VECTOR_BYTES <= MOST_VECTORS


def inbox_bytes(ranks: int) -> int:
    """What a rank's inbox takes on its GPU."""
    return SLOTS * (ranks + 1) * largest(ranks)


@dataclass(frozen=True, slots=True)
class Share:
    """The rows `start` to `stop` of a step, which rank `owner` of a stage sums and norms."""

    owner: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """To index tensors by."""
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def pieces(self, count: int) -> Iterator[slice]:
        """Its rows in `count` pieces of whole tiles, but for the last, or in fewer."""
        step = share_rows(len(self), count)
        for start in range(self.start, self.stop, step):
            yield slice(start, min(start + step, self.stop))


def share_rows(tokens: int, ranks: int) -> int:
    """Rows that the largest share may have."""
    return -(-_tiles(tokens) // ranks) * SHARE_STEP


def shares_of(tokens: int, ranks: int) -> tuple[Share, ...]:
    """Each rank's part of `tokens` rows, whole tiles but for the last."""
    ends = [min(tokens, rank * _tiles(tokens) // ranks * SHARE_STEP) for rank in range(ranks + 1)]
    return tuple(Share(rank, ends[rank], ends[rank + 1]) for rank in range(ranks))


def _tiles(tokens: int) -> int:
    return -(-tokens // SHARE_STEP)
