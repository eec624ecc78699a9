"""What the prefix cache gained and lost, in order, for those outside who follow what is cached here.

Invariants: replayed from the beginning, or from a `CacheCleared`, the events give exactly the keys of the prefix index.
Knows nothing of who reads them and of how they are sent.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagesCached:
    """Pages that can be found now, the first one behind `parent` (None: it begins a text).

    `tokens` are theirs, a page's worth for each key. `adapter` is the number of what they went through, 0 for none.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None
    tokens: array[int]
    page_size: int
    adapter: int = 0
    cache_salt: str = ""


@dataclass(slots=True)
class PagesGivenUp:
    """Pages that cannot be found any more."""

    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing can be found any more."""


CacheEvent = PagesCached | PagesGivenUp | CacheCleared


class CacheJournal:
    """Collects events until they are taken."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def cached(self, event: PagesCached) -> None:
        """Pages were published."""
        self._events.append(event)

    def given_up(self, key: bytes) -> None:
        """A page was evicted. One that follows another is told in one event with it."""
        last = self._events[-1] if self._events else None
        if isinstance(last, PagesGivenUp):
            last.keys.append(key)
        else:
            self._events.append(PagesGivenUp([key]))

    def cleared(self) -> None:
        """Every page was forgotten."""
        self._events.append(CacheCleared())

    def take(self) -> list[CacheEvent]:
        """What happened since the last call."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events
