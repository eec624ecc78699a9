"""Which kernel adds up a message, by its size and the number of ranks; and the memory that this takes.

One shot sends every word to every rank, two shots send it twice at most, with one more wait. Beyond LARGEST NCCL's
rings are as fast, and take no memory a rank. The sizes are those that others measured on H100s (vllm#24111, #22086);
none has been measured on our kernels yet.
Invariants: the choice depends on the shape alone, so all ranks make the same one.
Knows nothing of tensors.
"""

from __future__ import annotations

LARGEST = 4 << 20
ONE_SHOT = 512 << 10  # of more than two ranks; two send no less in two shots
MOST_RANKS = 8
SLOTS = 3
VECTOR_BYTES = 16
MOST_CTAS = 128  # all of which an H100 or H200 holds at once
MOST_VECTORS = 2048  # of a row


def shots_for(rows: int, row_bytes: int, ranks: int) -> int | None:
    """1 or 2; None where the kernels do not take a message of `rows` rows."""
    size = rows * row_bytes
    if size == 0 or size > LARGEST or row_bytes % VECTOR_BYTES or row_bytes // VECTOR_BYTES > MOST_VECTORS:
        return None
    return 1 if ranks == 2 or size <= ONE_SHOT else 2


def inbox_bytes(ranks: int) -> int:
    """What a rank's inbox takes on its GPU."""
    return SLOTS * (ranks + 1) * LARGEST
