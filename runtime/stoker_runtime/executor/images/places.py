"""Where a step's tokens stand when images are among them: their rows, and three positions for each.

A text token has one position in time, height and width; the tokens of an image share the time, and count rows and
columns from there. What follows an image goes on behind its longer side.
Source: M-RoPE, Qwen2-VL (arXiv 2409.12191), section 2.1.

Invariants: pure.
Knows nothing of devices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker_runtime.request import Image
from stoker_runtime.step.batch import PrefillChunk

Positions = NDArray[np.int32]


def chunk_positions(chunk: PrefillChunk, unit: int) -> Positions:
    """Time, height and width of a chunk's tokens, `[3, n]`; a token of an image covers `unit` pixels each way."""
    start, shift = chunk.start, chunk.shift
    stop = start + len(chunk.token_ids)
    found = np.tile(np.arange(start, stop, dtype=np.int32) + np.int32(shift), (3, 1))
    for image in chunk.images:
        begin, end = max(start, image.at), min(stop, image.end)
        first, columns = image.at + shift, image.width // unit
        within = np.arange(begin - image.at, end - image.at)
        place = slice(begin - start, end - start)
        found[:, place] = first
        found[1, place] += (within // columns).astype(np.int32)
        found[2, place] += (within % columns).astype(np.int32)
        shift += image.span - image.tokens
        if image.end < stop:
            found[:, image.end - start :] = np.arange(image.end, stop, dtype=np.int32) + np.int32(shift)
    return found


def shift_behind(chunk: PrefillChunk) -> int:
    """What is added to the place of the next token behind a chunk, if that is text, to get its position."""
    stop = chunk.start + len(chunk.token_ids)
    return chunk.shift + sum(each.span - each.tokens for each in chunk.images if each.end <= stop)


def rows_of(chunk: PrefillChunk, image: Image, first: int) -> tuple[range, range]:
    """The step's rows that show a part of `image`, and which of the image's tokens these are; the chunk's first token
    is the step's row `first`.
    """
    begin, end = max(chunk.start, image.at), min(chunk.start + len(chunk.token_ids), image.end)
    at = first - chunk.start
    return range(begin + at, end + at), range(begin - image.at, end - image.at)
