"""Where sequences live: gives them a slot and pages, grows and shares these, and takes them back.

Invariants: a sequence has a slot exactly while it has pages, and its pages cover every position launched. Pages
are offered to the prefix cache only after the step that fills them was launched. What is released may be named by
the next batch at once: the device runs batches in order, so a step still in flight is over before it is reused.
Knows nothing of policies, budgets or outcomes.
"""

from __future__ import annotations

from stoker_runtime.kvcache.manager import PageManager
from stoker_runtime.kvcache.prefix_index import extend_keys
from stoker_runtime.scheduler.batch import PageUpdate
from stoker_runtime.scheduler.draft import Draft
from stoker_runtime.scheduler.sequence import NO_SLOT, Sequence


class Placement:
    """Slots and pages of one device."""

    def __init__(self, pages: PageManager, num_slots: int) -> None:
        self.pages = pages
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.queries = 0
        self.hits = 0
        """Prompt tokens looked up in the prefix cache, and found there."""
        self._copy_sources: list[int] = []

    def lookup(self, sequence: Sequence) -> list[int]:
        """The cached pages that `sequence` may start from, not yet acquired.

        Positions whose prompt log-probabilities are still wanted are computed, whatever the cache holds.
        """
        if self.pages.index is None:
            return []
        size = self.pages.page_size
        extend_keys(sequence.keys, sequence.tokens, size, sequence.root)
        limit = len(sequence.keys)
        if sequence.scored < sequence.prompt_length - 1:
            limit = min(limit, sequence.scored // size)
        return self.pages.match(sequence.keys, limit)

    def is_being_computed(self, sequence: Sequence, cached: list[int], draft: Draft) -> bool:
        """Whether this step fills the first page that the cache lacks, so that waiting a step saves its work."""
        if sequence.scored < sequence.prompt_length - 1 or len(cached) == len(sequence.keys):
            return False
        return sequence.keys[len(cached)] in draft.computing

    def place(self, sequence: Sequence, cached: list[int], reserve: int, draft: Draft) -> bool:
        """Give a slot and pages for every known token; False when pages are short of that by `reserve`.

        When all tokens are cached the last one still runs, for its logits. It would write to the last cached
        page, so that page is copied; if there is no page for the copy, its tokens are computed again instead.
        """
        pages, total = self.pages, len(sequence.tokens)
        whole = len(cached) * pages.page_size == total
        room = pages.available - reserve
        if whole and room - pages.idle_among(cached) < 1:
            cached, whole = cached[:-1], False
        fresh = pages.pages_for(total) - len(cached)
        if fresh + whole > room - pages.idle_among(cached):
            return False
        pages.acquire(cached)
        sequence.pages = cached + pages.allocate(fresh)
        sequence.published = len(cached)
        sequence.computed = len(cached) * pages.page_size
        if whole:
            self._copy_last(sequence, draft)
        self._count_lookup(sequence)
        self._enter(sequence, draft)
        return True

    def fork(self, sequence: Sequence, source: Sequence, reserve: int, draft: Draft) -> bool:
        """Give a slot and the prompt's pages of `source`; False when pages are short of that by `reserve`.

        The prompt's last token runs again, for its logits. The page that it lies in is copied, those before are shared.
        """
        pages = self.pages
        covered = sequence.prompt_length - 1
        whole, rest = divmod(covered, pages.page_size)
        fresh = pages.pages_for(len(sequence.tokens)) - whole
        if fresh > pages.available - reserve:
            return False
        shared = source.pages[:whole]
        pages.acquire(shared)
        sequence.pages = shared + pages.allocate(fresh)
        sequence.computed = covered
        if rest:
            pages.acquire([source.pages[whole]])
            self._copy_sources.append(source.pages[whole])
            draft.copies.append((source.pages[whole], sequence.pages[whole]))
        self._enter(sequence, draft)
        return True

    def _enter(self, sequence: Sequence, draft: Draft) -> None:
        """Tell the device of a sequence that has got its pages."""
        sequence.slot = self.free_slots.pop()
        self._set_event(sequence)
        draft.assigns.append(sequence.assign())
        draft.page_updates.append(PageUpdate(sequence.slot, 0, tuple(sequence.pages)))

    def grow(self, sequence: Sequence, draft: Draft) -> bool:
        """One more page; False when there is none."""
        if self.pages.available < 1:
            return False
        page = self.pages.allocate(1)[0]
        draft.page_updates.append(PageUpdate(sequence.slot, len(sequence.pages), (page,)))
        sequence.pages.append(page)
        self._set_event(sequence)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Offer the pages that are known, launched and full to the prefix cache; set the next milestone."""
        pages = self.pages
        if pages.index is None:
            sequence.milestone = sequence.limit
            return
        full = min(len(sequence.tokens), sequence.computed) // pages.page_size
        if full > sequence.published:
            extend_keys(sequence.keys, sequence.tokens, pages.page_size, sequence.root)
            pages.publish(sequence.pages, sequence.keys, sequence.published, full)
            sequence.published = full
        sequence.milestone = min(sequence.limit, (full + 1) * pages.page_size)

    def release(self, sequence: Sequence) -> None:
        """Take slot and pages back; what is cached stays cached until it is evicted."""
        self.publish(sequence)
        if sequence.request.session:
            self.pages.keep(sequence.pages)
        self.free_slots.append(sequence.slot)
        self.pages.release(sequence.pages)
        sequence.slot = NO_SLOT
        sequence.pages = []
        sequence.published = 0

    def settle_copies(self) -> None:
        """The copies of the last batch were launched: let go of their sources."""
        if self._copy_sources:
            self.pages.release(self._copy_sources)
            self._copy_sources = []

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless slots and pages are exactly those of `sequences`."""
        slots = [sequence.slot for sequence in sequences]
        assert NO_SLOT not in slots, "a sequence is placed without a slot"
        assert sorted(slots + self.free_slots) == list(range(self.num_slots)), "slots are lost or shared"
        for sequence in sequences:
            capacity = len(sequence.pages) * self.pages.page_size
            assert sequence.computed <= capacity, f"{sequence.request.id} outgrew its pages"
        self.pages.check([*(sequence.pages for sequence in sequences), self._copy_sources])

    def _copy_last(self, sequence: Sequence, draft: Draft) -> None:
        source = sequence.pages[-1]
        copy = self.pages.copy_on_write(source)
        draft.copies.append((source, copy))
        self._copy_sources.append(source)
        sequence.pages[-1] = copy
        sequence.computed -= 1

    def _count_lookup(self, sequence: Sequence) -> None:
        if sequence.admitted is None and self.pages.index is not None:
            self.queries += sequence.prompt_length
            self.hits += sequence.computed
            sequence.cached_tokens = sequence.computed

    def _set_event(self, sequence: Sequence) -> None:
        # The decode that launches position `limit - 2` samples the last token.
        sequence.event = min(len(sequence.pages) * self.pages.page_size, sequence.limit - 2)
