"""One line on standard error that says how far a batch has come.

Invariants: rewritten a few times a second at most, so that it costs nothing beside the work.
Knows nothing of what is counted.
"""

from __future__ import annotations

import sys
import time

PROGRESS_SECONDS = 0.2


def watched(asked: bool | None) -> bool:
    """Whether to show progress: as asked, and by default where standard error is a terminal."""
    return sys.stderr.isatty() if asked is None else asked


class Progress:
    """One line on standard error, rewritten a few times a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._tokens = 0
        self._began = time.monotonic()
        self._shown = 0.0

    def show(self, done: int, tokens: int) -> None:
        """Count `tokens` more; rewrite the line when it is old or the work is done."""
        self._tokens += tokens
        now = time.monotonic()
        if now - self._shown < PROGRESS_SECONDS and done < self._total:
            return
        self._shown = now
        rate = self._tokens / max(now - self._began, 1e-9)
        sys.stderr.write(f"\r{done}/{self._total} sequences, {self._tokens} tokens, {rate:.0f} tokens/s ")
        sys.stderr.flush()

    def close(self) -> None:
        """Leave the line as it is."""
        sys.stderr.write("\n")
