"""Whether a queue has room, and how soon a full one has it again: the rate of the latest admissions.

Invariants: pure; told the time. Knows nothing of sequences.
"""

from __future__ import annotations

from collections import deque

from stoker_runtime.errors import CapacityError

LEAST_SECONDS = 1.0
MOST_SECONDS = 60.0


class AdmissionRate:
    """The times of the latest admissions."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)

    def note(self, now: float) -> None:
        """A sequence was admitted."""
        self._times.append(now)

    def require_room(self, waiting: int, max_queued: int, now: float) -> None:
        """Raises CapacityError, with the time to come again, when as many wait as may."""
        if waiting >= max_queued:
            full = CapacityError(f"The queue is full (waiting: {max_queued}); try again later.")
            full.retry_after = self.retry_after(max_queued, now)
            raise full

    def retry_after(self, queue_length: int, now: float) -> float:
        """Seconds until a tenth of such a queue is admitted, between 1 and 60."""
        if len(self._times) < 2:
            return LEAST_SECONDS
        rate = len(self._times) / max(now - self._times[0], 1e-3)
        return min(MOST_SECONDS, max(LEAST_SECONDS, queue_length / 10 / rate))
