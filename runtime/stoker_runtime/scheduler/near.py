"""Pages of layers with a window: a sequence holds those in sight, gets others chunk by chunk, and gives up the rest.

A place (`kvcache/sight.py`) has `parts` of these pages beside the one page of layers that see everything. What is given
up stays cached until it is evicted, under the key of its prefix and the number of its part. A cached prefix is a hit
only where these pages are there too as far back as its next token sees.

Invariants: what a sequence holds are the neighbouring places `[near_from, near_from + len(near))`; it never holds fewer
than a launched or scheduled query may read, and never writes one that is cached. Given up are only places that lie
behind every query to come: what was launched before runs before who gets them next.
Knows nothing of slots, of layers that see everything, and of who may run.
"""

from __future__ import annotations

from itertools import chain

from stoker_runtime.kvcache.manager import PageManager
from stoker_runtime.kvcache.sight import Sight
from stoker_runtime.scheduler.draft import Draft
from stoker_runtime.scheduler.sequence import Place, Sequence
from stoker_runtime.step.batch import PageUpdate


class NearPages:
    """The books of one device."""

    def __init__(self, pages: PageManager, sight: Sight) -> None:
        self.sight = sight
        self._pages = pages

    def covered(self, keys: list[bytes], count: int) -> int:
        """How many of the first `count` places of a cached prefix are a hit: all in sight of what follows is there."""
        size, at = self.sight.page_size, count
        while at > 0:
            first = self.sight.first(at * size)
            missing = next((each for each in range(at - 1, first - 1, -1) if self._cached(keys[each]) is None), None)
            if missing is None:
                return at
            # No longer prefix sees less far than up to what is missing.
            at = missing
        return 0

    def found(self, keys: list[bytes], count: int) -> list[Place]:
        """The cached places in sight of what follows the first `count`, which are `covered`."""
        places = [self._cached(key) for key in keys[self.sight.first(count * self.sight.page_size) : count]]
        return [place for place in places if place is not None]

    def wanted(self, tokens: int, found: list[Place]) -> int:
        """How many of the pages that are `available` it takes to begin a sequence of `tokens` that has `found` some."""
        fresh = self.sight.most(self._pages.pages_for(tokens)) - len(found)
        return max(fresh, 0) * self.sight.parts + self._pages.idle_among(chain.from_iterable(found))

    def enter(self, sequence: Sequence, found: list[Place], places: int) -> None:
        """A sequence begins behind its first `places`, of which it was `found` what is in sight."""
        self._pages.acquire(chain.from_iterable(found))
        sequence.near, sequence.near_from = list(found), places - len(found)

    def tell(self, sequence: Sequence, draft: Draft) -> None:
        """Tell the device of what a sequence holds that got its slot."""
        self._update(sequence, sequence.near_from, sequence.near, draft)

    def reach(self, sequence: Sequence, stop: int, draft: Draft) -> int:
        """Get pages up to position `stop`, as far as there are any; → how far they reach."""
        size, end = self.sight.page_size, sequence.near_from + len(sequence.near)
        count = min(self._pages.pages_for(stop) - end, self._pages.available // self.sight.parts)
        if count > 0:
            self._extend(sequence, count, draft)
            end += count
        return min(stop, end * size)

    def grow(self, sequence: Sequence, draft: Draft) -> None:
        """One more place; the caller has seen to it that there are pages."""
        self._extend(sequence, 1, draft)

    def give_up(self, sequence: Sequence) -> None:
        """Let go of what no query from `computed` on sees."""
        count = min(self.sight.first(sequence.computed) - sequence.near_from, len(sequence.near))
        if count > 0:
            self._pages.release(list(chain.from_iterable(sequence.near[:count])))
            del sequence.near[:count]
            sequence.near_from += count

    def publish(self, sequence: Sequence, start: int, stop: int) -> None:
        """Cache places `[start, stop)`, whose keys are known, as far as they are held."""
        for place in range(max(start, sequence.near_from), stop):
            pages, key = sequence.near[place - sequence.near_from], sequence.keys[place]
            self._pages.publish(pages, [part_key(key, part) for part in range(len(pages))], 0, len(pages))

    def release(self, sequence: Sequence) -> None:
        """Give up everything."""
        held = list(chain.from_iterable(sequence.near))
        if sequence.request.session:
            self._pages.keep(held)
        self._pages.release(held)
        sequence.near, sequence.near_from = [], 0

    def check(self, sequence: Sequence) -> None:
        """Raise AssertionError unless it holds what it needs and no more than its chunk and its window take."""
        end = sequence.near_from + len(sequence.near)
        assert sequence.near_from <= self.sight.first(sequence.computed), f"{sequence.request.id} gave up what it sees"
        assert end * self.sight.page_size >= sequence.computed, f"{sequence.request.id} outgrew its pages in sight"
        assert end <= len(sequence.pages), f"{sequence.request.id} has pages in sight beyond its tokens"
        assert all(len(place) == self.sight.parts for place in sequence.near), "a place lacks a part"

    def _extend(self, sequence: Sequence, count: int, draft: Draft) -> None:
        parts, end = self.sight.parts, sequence.near_from + len(sequence.near)
        pages = self._pages.allocate(count * parts)
        fresh = [tuple(pages[at : at + parts]) for at in range(0, len(pages), parts)]
        sequence.near += fresh
        self._update(sequence, end, fresh, draft)

    def _update(self, sequence: Sequence, start: int, places: list[Place], draft: Draft) -> None:
        for table, pages in enumerate(zip(*places, strict=True), start=1):
            draft.page_updates.append(PageUpdate(sequence.slot, start, pages, table))

    def _cached(self, key: bytes) -> Place | None:
        index = self._pages.index
        assert index is not None, "nothing is cached"
        pages: list[int] = []
        for part in range(self.sight.parts):
            page = index.page_of(part_key(key, part))
            if page is None:
                return None
            pages.append(page)
        return tuple(pages)


def part_key(key: bytes, part: int) -> bytes:
    """The key of a place's page for layers with a window, which no page of the others has: theirs are shorter."""
    return key + part.to_bytes(2, "little")
