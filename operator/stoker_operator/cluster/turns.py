"""Who may disturb pods now, of the many that a new default concerns: so many at a time.

Invariants: a turn ends when it is left, never by time: a change that fails stops those behind it. Nobody gets a turn
before every service was seen once after a start, since those that were under way then have theirs.
Knows nothing of what is done in a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker_operator.cluster.queue import Key

# After a start; 1,000 services are looked at in this time.
FIRST_LOOK_SECONDS = 30.0


class Turns:
    """At most `parallel` turns at a time; 0: any number."""

    def __init__(
        self, parallel: int, *, patience: float = FIRST_LOOK_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._parallel = parallel
        self._clock = clock
        self._from = clock() + patience
        self._held: dict[Key, None] = {}
        self._waiting: dict[Key, None] = {}

    @property
    def held(self) -> tuple[str, ...]:
        """Who has a turn, as namespace/name, the longest first."""
        return tuple("/".join(key) for key in self._held)

    def ask(self, key: Key) -> bool:
        """Whether `key` has its turn, from now on if one is free."""
        if key in self._held or not self._parallel:
            return True
        if len(self._held) >= self._parallel or self._clock() < self._from:
            self._waiting[key] = None
            return False
        self.take(key)
        return True

    def holds(self, key: Key) -> bool:
        """Whether `key` has its turn."""
        return key in self._held

    def take(self, key: Key) -> None:
        """Count `key` as one that has its turn, asked or not."""
        self._waiting.pop(key, None)
        self._held[key] = None

    def leave(self, key: Key) -> Key | None:
        """End the turn of `key`, if it has one; who is to ask next then, as the one that waits the longest."""
        if key not in self._held:
            return None
        del self._held[key]
        after = next(iter(self._waiting), None)
        if after is not None:
            del self._waiting[after]
        return after

    def forget(self, key: Key) -> Key | None:
        """As `leave`, for a key that will not ask again."""
        self._waiting.pop(key, None)
        return self.leave(key)
