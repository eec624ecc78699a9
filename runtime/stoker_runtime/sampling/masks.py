"""Which tokens each row of a step may get, as bits: written on the host, uploaded in one piece, read by the sampler.

Invariants: at most two steps are in flight, so two host buffers take turns: the one opened for a step was last uploaded
for a step that has been read back. Host memory is pinned when the first constrained step comes, not before.
Knows nothing of grammars or of how steps run.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

ALL = -1
"""A word that allows its 32 tokens."""


class HostWords:
    """One buffer on the host. `written` rows may hold something else than `ALL`."""

    def __init__(self, like: torch.Tensor) -> None:
        pin = like.device.type == "cuda"
        self.tensor = torch.empty(like.shape, dtype=torch.int32, pin_memory=pin).fill_(ALL)
        self.array: NDArray[np.int32] = self.tensor.numpy()
        self.written = 0


class TokenMasks:
    """Bit i of word w of a row allows token 32·w + i."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._device_words = torch.full((rows, mask_words(vocab)), ALL, dtype=torch.int32, device=device)
        self._host_words: list[HostWords] = []
        self._turn = 0

    def open(self, rows: int) -> NDArray[np.int32]:
        """The host's words of the first `rows` rows `[rows, ceil(V/32)]`, all tokens allowed, to be written."""
        if not self._host_words:
            self._host_words = [HostWords(self._device_words), HostWords(self._device_words)]
        self._turn = 1 - self._turn
        words = self._host_words[self._turn]
        words.array[: words.written] = ALL
        words.written = rows
        return words.array[:rows]

    def upload(self) -> None:
        """Send what was opened last to the device, without waiting."""
        words = self._host_words[self._turn]
        self._device_words[: words.written].copy_(words.tensor[: words.written], non_blocking=True)

    def rows(self, rows: int) -> torch.Tensor:
        """The device's words of the first `rows` rows."""
        return self._device_words[:rows]


def mask_words(vocab: int) -> int:
    """int32 words of a row."""
    return -(-vocab // 32)
