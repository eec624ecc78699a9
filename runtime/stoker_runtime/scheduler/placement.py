"""Where sequences live: gives them a slot and pages, grows and shares these, and takes them back.

A preempted sequence's own pages are copied to the host pool where there is one; what it shares with others stays
with them, in the prefix cache. Cached pages that the device gives up go to the host pool too. A sequence that comes
(back) takes the device's pages of its prefix, then the host's, and computes the rest.

Invariants: a sequence has a slot exactly while it has pages, and its pages cover every position launched. Pages
are offered to the prefix cache only after the step that fills them was launched. What is released may be named by
the next batch at once: the device runs batches in order, so a step still in flight is over before it is reused.
Where layers with a window give up pages, `near.py` keeps the books of theirs, and where layers keep a state,
`prefix_states.py` those of prefixes; sequences of a family share the prefix cache alone then, and a prompt's last page
is always computed. Beside pages that are given up there is no host pool.
Knows nothing of policies, budgets or outcomes.
"""

from __future__ import annotations

from stoker_runtime.kvcache.drafted_pages import DraftedPages
from stoker_runtime.kvcache.host_pool import HostPool, Moves
from stoker_runtime.kvcache.host_states import HostStates
from stoker_runtime.kvcache.manager import PageManager
from stoker_runtime.kvcache.prefix_index import extend_keys
from stoker_runtime.kvcache.sight import Sight
from stoker_runtime.request import EngineStats
from stoker_runtime.scheduler.adapter_slots import NO_ADAPTER, AdapterSlots
from stoker_runtime.scheduler.cache_notes import note_cached
from stoker_runtime.scheduler.draft import Draft
from stoker_runtime.scheduler.found import Found
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.near import NearPages
from stoker_runtime.scheduler.prefix_states import PrefixStates
from stoker_runtime.scheduler.sequence import NO_SLOT, Sequence
from stoker_runtime.scheduler.state_lookup import find_with_states
from stoker_runtime.step.batch import PageUpdate


class Placement:
    """Slots and pages of one device, and the host's pages where there is a pool."""

    def __init__(
        self,
        pages: PageManager,
        num_slots: int,
        host: HostPool | None = None,
        adapter_slots: int = 0,
        sight: Sight | None = None,
        states: PrefixStates | None = None,
    ) -> None:
        alone = sight is None or (host is None and states is None)
        assert alone, "the host pool and states know nothing of pages that are given up"
        assert host is None or states is None or host.states is not None, "pages move to the host without their states"
        self.pages = pages
        self.states = states
        self.near = None if sight is None else NearPages(pages, sight)
        self.growth = 1 if sight is None else 1 + sight.parts
        """Pages that the next `page_size` tokens of a sequence take."""
        self.adapters = AdapterSlots(adapter_slots)
        self.host = host
        if host is not None or states is not None:
            pages.on_evict = self._evicted
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.queries = 0
        self.hits = 0
        """Prompt tokens looked up in the prefix cache, and found there, on the device."""
        self.host_queries = 0
        self.host_hits = 0
        """Of the tokens not found there, those looked up in the host pool, and found there."""
        self.swapped = 0
        """Sequences that wait and have pages stored on the host."""
        self.copy_sources: list[int] = []
        """Pages that the next batch copies, held until it was launched."""

    @classmethod
    def of(cls, config: SchedulerConfig) -> Placement:
        """All slots and pages that `config` speaks of."""
        size, caching = config.page_size, config.prefix_caching
        host = None
        if config.host_pages:
            kept = HostStates(config.host_states, config.host_state_tokens) if config.host_states else None
            tokens = config.host_page_tokens
            host = HostPool(config.host_pages, size, prefix_caching=caching, page_tokens=tokens, states=kept)
        pages = PageManager(config.num_pages, size, prefix_caching=caching)
        pages.journal = config.journal
        if config.draft_costs is not None:
            pages.drafted = DraftedPages()
            if host is not None:
                host.drafted = pages.drafted
        states = PrefixStates.of(config, pages)
        return cls(pages, config.max_num_seqs, host, config.adapter_slots, config.sight, states)

    def lookup(self, sequence: Sequence) -> Found:
        """What `sequence` may start from, not yet acquired.

        Positions whose prompt log-probabilities are still wanted are computed, whatever the caches hold.
        """
        size, host, keys, stored = self.pages.page_size, self.host, sequence.keys, sequence.stored
        limit = 0
        if self.pages.index is not None:
            extend_keys(keys, sequence.tokens, size, sequence.root, sequence.request.images)
            limit = len(keys)
            if sequence.scored < sequence.prompt_length - 1:
                limit = min(limit, sequence.scored // size)
        device = self.pages.match(keys, limit)
        if self.near is not None:
            device = device[: min(len(device), (len(sequence.tokens) - 1) // size)]
            device = device[: self.near.covered(keys, len(device))]
            return Found(device, [], len(device) * size, self.near.found(keys, len(device)))
        at = len(device)
        if self.states is not None or (host is not None and host.states is not None):
            return find_with_states(sequence, device, limit, size, host, self.states)
        if host is None:
            return Found(device, [], at * size)
        found = host.match(keys, limit if stored is None else min(limit, stored.first), at)
        at += len(found)
        if stored is None or at < stored.first:
            return Found(device, found, at * size)
        return Found(device, found + list(stored.pages[at - stored.first :]), max(stored.positions, at * size))

    def is_being_computed(self, sequence: Sequence, found: Found, draft: Draft) -> bool:
        """Whether this step fills the first page that the caches lack, so that waiting a step saves its work."""
        at = len(found.device) + len(found.host)
        if sequence.scored < sequence.prompt_length - 1 or at >= len(sequence.keys):
            return False
        return sequence.stored is None and sequence.keys[at] in draft.computing

    def pages_wanted(self, sequence: Sequence, found: Found) -> int:
        """How many of the pages that are `available` it would take to place `sequence`, a copy of the last included."""
        size, total = self.pages.page_size, len(sequence.tokens)
        fresh = self.pages.pages_for(total) - len(found.device) + (len(found.device) * size == total)
        near = 0 if self.near is None else self.near.wanted(total, found.near)
        return fresh + near + self.pages.idle_among(found.device)

    @property
    def room(self) -> int:
        """Pages that a new sequence may take: not the last ones, lest it is preempted right after its prefill."""
        running = self.num_slots - len(self.free_slots)
        return self.pages.available - min(running * self.growth, self.pages.num_pages // 100)

    def place(self, sequence: Sequence, found: Found, source: Sequence | None, draft: Draft) -> bool:
        """Give a slot and pages for every known token; False when there is no room.

        What needs no computing comes from `source`, another sequence of the same prompt, or else from what was `found`.
        When all tokens are cached the last one still runs, for its logits. It would write to the last cached
        page, so that page is copied; if there is no page for the copy, its tokens are computed again instead.
        """
        if source is not None:
            return self._fork(sequence, source, draft)
        pages, total = self.pages, len(sequence.tokens)
        cached, covered = found.device, found.covered
        whole = len(cached) * pages.page_size == total
        room = self.room
        if whole and room - pages.idle_among(cached) < 1:
            cached, whole, covered = cached[:-1], False, total - pages.page_size
        fresh = pages.pages_for(total) - len(cached)
        near = 0 if self.near is None else self.near.wanted(total, found.near)
        if fresh + near + whole > room - pages.idle_among(cached):
            return False
        pages.acquire(cached)
        if self.host is not None and found.state is not None:
            # Before pages are taken: those that the device gives up may take states' places on the host.
            self.host.bring_state(found.state, self.free_slots[-1])
        if self.near is not None:
            self.near.enter(sequence, found.near, len(cached))
        sequence.pages = cached + self._blank(sequence, found.host, fresh)
        sequence.published = len(cached)
        sequence.computed = min(covered, total - 1)
        if whole:
            self._copy_last(sequence, draft)
        self._count_lookup(sequence, len(cached) * pages.page_size)
        self._enter(sequence, draft)
        if self.states is not None:
            self.states.enter(sequence, found, draft)
        return True

    def _blank(self, sequence: Sequence, found: list[int], count: int) -> list[int]:
        """`count` blank pages, the first ones to be filled from the host pages that were `found`."""
        host = self.host
        if host is None:
            return self.pages.allocate(count)
        # Held first: a page that the device gives up may take the place of one that nobody holds.
        host.hold(found)
        blank = self.pages.allocate(count)
        host.bring(found, blank[: len(found)], sequence.stored)
        if sequence.stored is not None:
            sequence.stored = None
            self.swapped -= 1
        return blank

    def _fork(self, sequence: Sequence, source: Sequence, draft: Draft) -> bool:
        """Give a slot and the prompt's pages of `source`; False when there is no room.

        The prompt's last token runs again, for its logits. The page that it lies in is copied, those before are shared.
        """
        pages = self.pages
        covered = sequence.prompt_length - 1
        whole, rest = divmod(covered, pages.page_size)
        fresh = pages.pages_for(len(sequence.tokens)) - whole
        if fresh > self.room:
            return False
        shared = source.pages[:whole]
        pages.acquire(shared)
        sequence.pages = shared + pages.allocate(fresh)
        sequence.computed = covered
        if rest:
            pages.acquire([source.pages[whole]])
            self.copy_sources.append(source.pages[whole])
            draft.copies.append((source.pages[whole], sequence.pages[whole]))
        self._enter(sequence, draft)
        return True

    def _enter(self, sequence: Sequence, draft: Draft) -> None:
        """Tell the device of a sequence that has got its pages."""
        sequence.slot = self.free_slots.pop()
        sequence.adapter_slot = self.adapters.acquire(sequence.request.adapter)
        self.adapters.queue(sequence.request.adapter, -1)
        self.set_event(sequence)
        draft.assigns.append(sequence.assign())
        draft.page_updates.append(PageUpdate(sequence.slot, 0, tuple(sequence.pages)))
        if self.near is not None:
            self.near.tell(sequence, draft)

    def reach(self, sequence: Sequence, stop: int, draft: Draft) -> int:
        """How far towards position `stop` its pages reach, or can be made to."""
        if self.states is not None:
            return self.states.reach(sequence, stop)
        return stop if self.near is None else self.near.reach(sequence, stop, draft)

    def settle(self, sequence: Sequence) -> None:
        """Its chunk was launched: the pages can be shared, and what is out of sight from its end is given up."""
        self.publish(sequence)
        if self.states is not None:
            self.states.settle(sequence)
        if self.near is not None:
            self.near.give_up(sequence)

    def cross(self, sequence: Sequence, draft: Draft) -> bool:
        """A page for the next token of a sequence that decodes; False when there is none."""
        if self.states is not None:
            self.publish(sequence)
            self.states.begin_page(sequence)
        return self.grow(sequence, draft)

    def grow(self, sequence: Sequence, draft: Draft) -> bool:
        """One more page, and with them those of layers with a window; False when there are none."""
        if self.near is not None:
            self.near.give_up(sequence)
        if self.pages.available < self.growth:
            return False
        if self.near is not None:
            self.near.grow(sequence, draft)
        page = self.pages.allocate(1)[0]
        draft.page_updates.append(PageUpdate(sequence.slot, len(sequence.pages), (page,)))
        sequence.pages.append(page)
        self.set_event(sequence)
        return True

    def capacity(self, sequence: Sequence) -> int:
        """Positions that its pages hold."""
        return len(sequence.pages) * self.pages.page_size

    def publish(self, sequence: Sequence) -> None:
        """Offer the pages that are known, launched and full to the prefix cache; set the next milestone."""
        pages = self.pages
        if pages.index is None:
            sequence.milestone = sequence.limit
            return
        full = min(len(sequence.tokens), sequence.computed) // pages.page_size
        if full > sequence.published:
            images = sequence.request.images
            extend_keys(sequence.keys, sequence.tokens, pages.page_size, sequence.root, images)
            fresh = pages.publish(sequence.pages, sequence.keys, sequence.published, full)
            if self.near is not None:
                self.near.publish(sequence, sequence.published, full)
            if pages.journal is not None:
                note_cached(pages.journal, sequence, fresh, pages.page_size)
            sequence.published = full
        sequence.milestone = min(sequence.limit, (full + 1) * pages.page_size)

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and pages back, and copy to the host what no other sequence holds, if there is room and it pays."""
        if self.host is not None:
            self.publish(sequence)
            # States are those behind what was drafted and counts, of which the pages are needed, too.
            ahead = sequence.ahead if self.host.states is not None else 0
            count = self.pages.pages_for(sequence.computed + ahead)
            first = self.pages.shared_prefix(sequence.pages[:count])
            if first < count or (count and self.host.states is not None):
                own = sequence.pages[first:count]
                # A prompt's keys are known before all of it is computed: its last page here may not deserve one yet.
                keys = sequence.keys[first : sequence.computed // self.pages.page_size]
                stored = self.host.store(own, keys, first, sequence.computed, ahead, sequence.slot)
                sequence.stored, self.swapped = stored, self.swapped + (stored is not None)
        self.release(sequence)
        self.adapters.queue(sequence.request.adapter, 1)
        sequence.computed = sequence.ahead = 0

    def forget(self, sequence: Sequence) -> None:
        """A sequence without a slot gives up what it stored on the host."""
        if self.host is not None and sequence.stored is not None:
            self.host.drop(sequence.stored)
            sequence.stored = None
            self.swapped -= 1

    def dismiss(self, sequence: Sequence) -> None:
        """A sequence without a slot ends; it may have waited."""
        if sequence.queued:
            self.adapters.queue(sequence.request.adapter, -1)
        self.forget(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take slot and pages back; what is cached stays cached until it is evicted."""
        self.publish(sequence)
        if sequence.request.session:
            self.pages.keep(sequence.pages)
            if self.states is not None:
                self.states.snapshots.keep(sequence.keys)
        self.free_slots.append(sequence.slot)
        self.adapters.release(sequence.request.adapter)
        sequence.adapter_slot = NO_ADAPTER
        self.pages.release(sequence.pages)
        if self.near is not None:
            self.near.release(sequence)
        sequence.slot = NO_SLOT
        sequence.pages = []
        sequence.published = sequence.drafted = 0
        sequence.caught_up = None

    def settle_copies(self) -> None:
        """The copies of the last batch were launched: let go of their sources."""
        if self.copy_sources:
            self.pages.release(self.copy_sources)
            self.copy_sources = []
        if self.host is not None:
            self.host.settle()

    def take_moves(self) -> dict[str, Moves]:
        """What the next batch moves, by its fields: pages and states to the host and back, adapters, states to keep."""
        moves = {"adapter_loads": self.adapters.take_loads()}
        if self.host is not None:
            moves["swap_outs"], moves["swap_ins"] = self.host.take_moves()
            if self.host.states is not None:
                moves["state_outs"], moves["state_ins"] = self.host.states.take_moves()
        if self.states is not None:
            moves["state_saves"] = self.states.snapshots.take_saves()
        return moves

    def clear_caches(self) -> None:
        """Forget what is cached on the device and on the host, for when nothing there can be trusted."""
        self.pages.clear_cache()
        if self.states is not None:
            self.states.snapshots.clear()
        self.adapters.forget()
        if self.pages.drafted is not None:
            self.pages.drafted.clear()
        if self.host is not None:
            self.host.clear()

    def count(self, stats: EngineStats) -> None:
        """Fill in what `stats` say of slots, pages and caches."""
        stats.running = self.num_slots - len(self.free_slots)
        stats.pages_used, stats.pages_total = self.pages.used, self.pages.num_pages
        stats.prefix_queries, stats.prefix_hits = self.queries, self.hits
        if (host := self.host) is not None:
            stats.swapped = self.swapped
            stats.host_pages_used, stats.host_pages_total = host.pages.used, host.pages.num_pages
            stats.host_queries, stats.host_hits = self.host_queries, self.host_hits
            stats.pages_swapped_out, stats.pages_swapped_in = host.moved_out, host.moved_in

    def _evicted(self, page: int, key: bytes) -> None:
        """The device gives up a cached page, and what is kept beside it."""
        if self.host is not None:
            self.host.evicted(page, key)
        row = None if self.states is None else self.states.snapshots.page_given_up(key)
        if self.host is not None and row is not None:
            self.host.evicted_snapshot(key, row)

    def _copy_last(self, sequence: Sequence, draft: Draft) -> None:
        source = sequence.pages[-1]
        copy = self.pages.copy_on_write(source)
        draft.copies.append((source, copy))
        self.copy_sources.append(source)
        sequence.pages[-1] = copy

    def _count_lookup(self, sequence: Sequence, on_device: int) -> None:
        if sequence.admitted is not None or self.pages.index is None:
            return
        on_device = min(on_device, sequence.computed)
        self.queries += sequence.prompt_length
        self.hits += on_device
        if self.host is not None:
            self.host_queries += sequence.prompt_length - on_device
            self.host_hits += sequence.computed - on_device
        sequence.cached_tokens = sequence.computed

    def set_event(self, sequence: Sequence) -> None:
        """When the scheduler has to look at it again, by its pages, its limit and the drafts in flight."""
        # The decode that launches position `limit - 2` samples the last token.
        sequence.event = min(self.capacity(sequence) - sequence.ahead, sequence.limit - 2)
