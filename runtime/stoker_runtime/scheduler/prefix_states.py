"""States of prefixes: where a prompt's chunks end so that its states are kept, and where another one goes on from.

A chunk ends where a page does. A prompt's last chunk begins where its last whole page ends, for the next prompt that
begins so; and one chunk ends where pages were found cached without states, for where two prompts part a third one will.
A decode that begins a page keeps the states before it, for who goes on with its text, where a row is spare.

Invariants: states are kept by the step after the one that made them, before anything writes to them; a chunk that
cannot end where a page does keeps none. Nothing waits for a snapshot.
Knows nothing of who holds pages, of slots and policies.
"""

from __future__ import annotations

from stoker_runtime.kvcache.manager import PageManager
from stoker_runtime.kvcache.snapshots import Snapshots
from stoker_runtime.scheduler.draft import Draft
from stoker_runtime.scheduler.found import Found
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.sequence import Sequence


class PrefixStates:
    """The decisions; the books are those of `Snapshots`."""

    def __init__(self, snapshots: Snapshots, pages: PageManager, least: int = 0) -> None:
        """`least`: tokens that have to be before a cut, and were not there, for a chunk to be cut."""
        self.snapshots = snapshots
        self._least = least
        self._pages = pages
        self._size = pages.page_size

    @classmethod
    def of(cls, config: SchedulerConfig, pages: PageManager) -> PrefixStates | None:
        """None where pages are enough, or nothing is cached."""
        if not config.snapshots or not config.prefix_caching:
            return None
        return cls(Snapshots(config.snapshots, config.max_num_seqs), pages, config.snapshot_tokens)

    def enter(self, sequence: Sequence, found: Found, draft: Draft) -> None:
        """A sequence that got its slot goes on from what was `found`."""
        if found.covered and found.state is None:
            key = sequence.keys[found.covered // self._size - 1]
            draft.state_loads.append((self.snapshots.use(key), sequence.slot))
        whole = (len(sequence.tokens) - 1) // self._size
        marks, last = [], found.covered
        for end in (min(found.cached, whole) * self._size, whole * self._size):
            if end - last >= max(self._least, 1):
                marks.append(end)
                last = end
        sequence.marks, sequence.saved = tuple(marks), None

    def reach(self, sequence: Sequence, stop: int) -> int:
        """Where a chunk that may run to position `stop` ends."""
        start = sequence.computed
        for mark in sequence.marks:
            if start < mark < stop:
                return mark
        if stop == len(sequence.tokens):
            return stop
        down = stop // self._size * self._size
        return down if down > start else stop

    def settle(self, sequence: Sequence) -> None:
        """Its chunk was launched, and its whole pages are cached: keep its states, if one ended there.

        Of states within a prompt the last ones are of use: earlier ones are given up before all others.
        """
        pages, rest = divmod(sequence.computed, self._size)
        if rest or not pages:
            return
        if sequence.saved is not None:
            self.snapshots.spare(sequence.saved)
        key = sequence.keys[pages - 1]
        self.snapshots.save(key, sequence.slot)
        sequence.saved = None if sequence.computed in sequence.marks else key

    def begin_page(self, sequence: Sequence) -> None:
        """All that was launched of a sequence that decodes fills its pages: keep its states, if these are cached."""
        pages, rest = divmod(sequence.computed, self._size)
        if rest or sequence.ahead or pages > sequence.published:
            return
        # The page that was cached may have been another one's, and be gone.
        if self._pages.is_cached(key := sequence.keys[pages - 1]):
            self.snapshots.save(key, sequence.slot, spare=True)
