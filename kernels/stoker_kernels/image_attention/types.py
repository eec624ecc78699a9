"""Where the images of a step lie: in its tokens, and in the keys of their sequences.

Invariants: nothing here is read on the host but the plain integer, which is a bound; the tensors may change between
replays of a captured graph. Knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageSpans:
    """The `n` images of which a step computes tokens: all that is left of each, up to its end.

    `slots [n]` int32 is a line of the page table, `rows [n]` the first row of `q` that is an image's, `counts [n]` how
    many there are (0: nothing is done), `begins [n]` the place of the image's first token among the keys of its
    sequence, `ends [n]` that behind its last: row `rows + i` sits at place `ends − counts + i`.
    `most_rows` is a host bound of `counts`. Each tensor is contiguous, and may start at any element of an upload.
    """

    slots: Tensor
    rows: Tensor
    counts: Tensor
    begins: Tensor
    ends: Tensor
    most_rows: int
