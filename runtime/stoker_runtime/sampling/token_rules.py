"""What a request says of tokens and words: the ids that are allowed at all, and words that must not be written.

Invariants: pure; rules only ever take tokens out of a mask.
Knows nothing of grammars, of how text is cut into tokens, or of devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker_runtime.request import SamplingParams

Words = NDArray[np.int32]


class TokenRules:
    """The rules of one request. Bit i of word w of a mask allows token 32·w + i."""

    def __init__(self, params: SamplingParams, vocab: int) -> None:
        self._allowed: Words | None = None
        if params.allowed_token_ids:
            self._allowed = np.zeros(-(-vocab // 32), dtype=np.int32)
            ids = np.array(params.allowed_token_ids)
            np.bitwise_or.at(self._allowed, ids // 32, bits(ids))
        self._bad = np.array(params.bad_tokens, dtype=np.int64)
        self._phrases = tuple(word for word in params.bad_words if len(word) > 1)
        self._longest = max((len(word) - 1 for word in self._phrases), default=0)

    def apply(self, words: Words, output: Sequence[int]) -> None:
        """Take out of the mask `words` what must not follow `output`."""
        if self._allowed is not None:
            words &= self._allowed
        bad = self._bad
        if self._phrases:
            tail = tuple(output[-self._longest :])
            ends = [word[-1] for word in self._phrases if tail[len(tail) - len(word) + 1 :] == word[:-1]]
            bad = np.concatenate((bad, np.array(ends, dtype=np.int64)))
        if len(bad):
            clear(words, bad)


def clear(words: Words, ids: NDArray[np.int64]) -> None:
    """Take `ids` out of a mask."""
    np.bitwise_and.at(words, ids // 32, ~bits(ids))


def bits(ids: NDArray[np.int64]) -> Words:
    """The bit of each id in its word."""
    return np.left_shift(1, ids % 32).astype(np.uint32).view(np.int32)
