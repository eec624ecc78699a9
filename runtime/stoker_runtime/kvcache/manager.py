"""Who owns which KV page: allocation, sharing by reference count, copy-on-write, and what is cached.

Invariants: a page is in exactly one of three states: free (blank), idle (cached, unreferenced, may be evicted) or
referenced. A page with a prefix key is never written again. Every call is O(pages it touches).
Knows nothing of slots, batches, steps or devices: page numbers only. When a freed page may be overwritten is the
caller's question (the scheduler's: the device runs batches in order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stoker_runtime.kvcache.drafted_pages import DraftedPages
from stoker_runtime.kvcache.journal import CacheJournal
from stoker_runtime.kvcache.prefix_index import PrefixIndex


class PageManager:
    """All pages of one device, numbered from 0."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.index: PrefixIndex | None = PrefixIndex(num_pages) if prefix_caching else None
        self.on_evict: Callable[[int, bytes], None] | None = None
        """Told of each cached page that `allocate` takes away, and of the key that it had."""
        self.journal: CacheJournal | None = None
        """Where evictions and clearings are noted; who publishes notes what."""
        self.drafted: DraftedPages | None = None
        """Which of these pages a draft model has computed, where there is one."""
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones and cached ones that nobody references."""
        return len(self._free) + (self.index.idle_count if self.index is not None else 0)

    @property
    def used(self) -> int:
        """Pages that sequences reference."""
        return self.num_pages - self.available

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def match(self, keys: list[bytes], limit: int) -> list[int]:
        """The pages of the longest cached prefix, not yet referenced for the caller."""
        return self.index.match(keys, limit) if self.index is not None else []

    def is_cached(self, key: bytes) -> bool:
        """Whether a page is cached under this key."""
        return self.index is not None and self.index.page_of(key) is not None

    def references(self, page: int) -> int:
        """How often the page is referenced."""
        return self._references[page]

    def shared_prefix(self, pages: Sequence[int]) -> int:
        """How many leading pages of a sequence that holds them are cached and referenced by others too."""
        for position, page in enumerate(pages):
            if self._references[page] < 2 or self.index is None or not self.index.is_keyed(page):
                return position
        return len(pages)

    def idle_among(self, pages: Iterable[int]) -> int:
        """How many of these pages are counted in `available` now and would not be once acquired."""
        references = self._references
        return sum(1 for page in pages if references[page] == 0)

    def acquire(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are cached or referenced already."""
        references = self._references
        for page in pages:
            if references[page] == 0:
                assert self.index is not None, f"page {page} is free and cannot be shared"
                self.index.wake(page)
            references[page] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blank pages with one reference each, the coldest cached pages evicted if need be.

        The caller has checked `available`; IndexError or KeyError otherwise.
        """
        free = self._free
        pages = []
        for _ in range(count):
            if free:
                page = free.pop()
            else:
                assert self.index is not None, "no free page: check `available` first"
                page, key = self.index.evict()
                if self.journal is not None:
                    self.journal.given_up(key)
                if self.on_evict is not None:
                    self.on_evict(page, key)
            self._references[page] = 1
            pages.append(page)
        if self.drafted is not None:
            self.drafted.blank(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page.

        Cached pages rest last page first, so that a prefix outlives its continuations in the LRU order.
        """
        references, index, free = self._references, self.index, self._free
        for page in reversed(pages):
            count = references[page] - 1
            assert count >= 0, f"page {page} was released twice"
            references[page] = count
            if count:
                continue
            if index is not None and index.is_keyed(page):
                index.rest(page)
            else:
                free.append(page)

    def keep(self, pages: Iterable[int]) -> None:
        """These pages belong to a session: cached, they outlive those that do not."""
        for page in pages:
            if self.index is not None and self.index.is_keyed(page):
                self.index.keep(page)

    def is_writable(self, page: int) -> bool:
        """Whether a sequence that holds the page may write to it: nobody shares it and it is not cached."""
        return self._references[page] == 1 and not (self.index is not None and self.index.is_keyed(page))

    def copy_on_write(self, page: int) -> int:
        """A blank page to copy `page` into before writing.

        The caller keeps its reference to `page` until the copy was launched, then releases it.
        """
        assert not self.is_writable(page), f"page {page} needs no copy"
        return self.allocate(1)[0]

    def publish(self, pages: Sequence[int], keys: Sequence[bytes], start: int, stop: int) -> list[int]:
        """Cache pages `[start, stop)` of a sequence under their keys. Their content must have been launched.

        Returns the positions whose prefix was not cached before.
        """
        index = self.index
        if index is None:
            return []
        return [position for position in range(start, stop) if index.publish(pages[position], keys[position])]

    def clear_cache(self) -> None:
        """Forget every cached prefix, for when the content of pages cannot be trusted."""
        if self.index is not None:
            self._free.extend(self.index.clear())
            if self.journal is not None:
                self.journal.cleared()

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless reference counts, free list and cache agree with the pages that are held."""
        counts = [0] * self.num_pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        wrong = [page for page in range(self.num_pages) if counts[page] != self._references[page]]
        assert not wrong, f"pages with a wrong reference count: {wrong[:8]}"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not any(counts[page] for page in free), "a free page is referenced"
        idle = set()
        if self.index is not None:
            self.index.check(self._references)
            idle = {page for page in range(self.num_pages) if self.index.is_idle(page)}
        assert not free & idle, "a page is both free and cached"
        referenced = sum(1 for count in counts if count)
        assert len(free) + len(idle) + referenced == self.num_pages, "pages are lost"
