"""How soon a full queue has room again: the rate of the latest admissions.

Invariants: pure; told the time. Knows nothing of sequences.
"""

from __future__ import annotations

from collections import deque

LEAST_SECONDS = 1.0
MOST_SECONDS = 60.0


class AdmissionRate:
    """The times of the latest admissions."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)

    def note(self, now: float) -> None:
        """A sequence was admitted."""
        self._times.append(now)

    def retry_after(self, queue_length: int, now: float) -> float:
        """Seconds until a tenth of such a queue is admitted, between 1 and 60."""
        if len(self._times) < 2:
            return LEAST_SECONDS
        rate = len(self._times) / max(now - self._times[0], 1e-3)
        return min(MOST_SECONDS, max(LEAST_SECONDS, queue_length / 10 / rate))
