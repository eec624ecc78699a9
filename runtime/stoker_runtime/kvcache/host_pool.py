"""KV pages in host memory: copies of what preempted sequences computed, and of cached pages that the device gave up.

A step moves pages in two lists: `outs` (device page, host page), then `ins` (host page, device page), both before
anything in the step writes. So a device page is free for others in the step that copies it out.

Where layers keep a state, pages alone are of no use: what is stored has its states beside them (`host_states.py`), and
so may a cached prefix.

Invariants: a host page is in one of the three states of `PageManager`; one whose copy was not launched yet cannot be
found by its key, one that a step brings back is held until that step was launched. The pool only saves work: whatever
it lacks is computed again. Every call is O(pages it touches).
Knows nothing of slots, devices or what moves the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker_runtime.kvcache.drafted_pages import DraftedPages
from stoker_runtime.kvcache.host_states import HostStates
from stoker_runtime.kvcache.manager import PageManager

Moves = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Positions `[first · page size, positions)` of a preempted sequence, on host pages that it holds.

    Pages before `first` were shared when it left; they are looked for by their keys. Where layers keep a state, it is
    that behind all tokens that count, `ahead` more at most: which do is known once drafts in flight are. It lies in the
    host's row `state`.
    """

    first: int
    pages: tuple[int, ...]
    positions: int
    ahead: int = 0
    state: int | None = None


class HostPool:
    """All KV pages in host memory, numbered from 0.

    `page_tokens`: bringing a page back takes as long as computing so many tokens. Where a page's own tokens are fewer,
    they are computed again.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool,
        page_tokens: float = 0.0,
        states: HostStates | None = None,
    ) -> None:
        """`states`: None where pages are all that a sequence has."""
        self.pages = PageManager(num_pages, page_size, prefix_caching=prefix_caching)
        self.states = states
        if states is not None:
            self.pages.on_evict = lambda _, key: states.page_given_up(key)
        self.page_tokens = page_tokens
        self.moved_out = 0
        self.moved_in = 0
        """Pages copied in each direction since start."""
        self.drafted: DraftedPages | None = None
        """Which pages a draft model has computed, where there is one."""
        self._outs: list[tuple[int, int]] = []
        self._ins: list[tuple[int, int]] = []
        self._arriving: dict[bytes, int] = {}
        """Pages to be cached under these keys once their copy was launched; one reference each."""
        self._launched: dict[bytes, int] = {}
        self._returning: list[int] = []
        """References to pages that a step brings back, until it was launched."""
        self._returned: list[int] = []

    def store(
        self, pages: Sequence[int], keys: Sequence[bytes], first: int, positions: int, ahead: int = 0, slot: int = -1
    ) -> Stored | None:
        """Copy the device's `pages`, which hold a sequence from page number `first` to `positions`, to the host.

        `keys[i]` is the key of `pages[i]`, for as many as have one; of a sequence with states those of its `slot` go
        along. None when there is no room, or it does not pay.
        """
        computing = positions - (first * self.pages.page_size if self.states is None else 0)
        if len(pages) * self.page_tokens + (0 if self.states is None else self.states.tokens) > computing:
            return None
        known = [self._known(key) for key in keys[: len(pages)]]
        known += [None] * (len(pages) - len(known))
        here = [page for page in known if page is not None]
        if len(pages) - len(here) > self.pages.available - self.pages.idle_among(here):
            return None
        state = None
        if self.states is not None and (state := self.states.store(slot)) is None:
            return None
        self.pages.acquire(here)
        fresh = iter(self.pages.allocate(len(pages) - len(here)))
        held = tuple(next(fresh) if page is None else page for page in known)
        for at, (source, target) in enumerate(zip(pages, held, strict=True)):
            if known[at] is None:
                self._move_out(source, target)
                if at < len(keys):
                    self.pages.acquire([target])
                    self._arriving[keys[at]] = target
        return Stored(first, held, positions, ahead, state)

    def drop(self, stored: Stored) -> None:
        """A sequence gives up what it stored; pages that have a key stay cached."""
        self.pages.release(stored.pages)
        if self.states is not None and stored.state is not None:
            self.states.drop(stored.state)

    def evicted(self, page: int, key: bytes) -> None:
        """The device gives up a cached page: keep a copy if that pays and there is room."""
        if self.page_tokens > self.pages.page_size:
            return
        known = self._known(key)
        if known is not None:
            # Used again: it goes to the end of the line.
            self.pages.acquire([known])
            self.pages.release([known])
        elif self.pages.available:
            [target] = self.pages.allocate(1)
            self._move_out(page, target)
            self._arriving[key] = target

    def evicted_snapshot(self, key: bytes, row: int) -> None:
        """The device gives up the states behind a page that it gave up just before: keep them where the page is kept.
        """
        if self.states is not None and self._known(key) is not None:
            self.states.keep(key, row)

    def match(self, keys: list[bytes], limit: int, start: int) -> list[int]:
        """Host pages of the longest cached run of `keys[start:limit]`."""
        return [] if self.pages.index is None else self.pages.index.match(keys, limit, start)

    def hold(self, found: Sequence[int]) -> None:
        """Pages that the step under way will bring back: they stay until it was launched."""
        self.pages.acquire(found)
        self._returning += found

    def bring(self, found: Sequence[int], targets: Sequence[int], stored: Stored | None) -> None:
        """Copy pages that are on `hold` to the device's `targets`; `stored`, if any, is let go after that."""
        self._ins += zip(found, targets, strict=True)
        if self.drafted is not None:
            for host, page in zip(found, targets, strict=True):
                self.drafted.moved_in(host, page)
        if stored is not None:
            self._returning += stored.pages
            if self.states is not None and stored.state is not None:
                self.states.drop(stored.state)

    def bring_state(self, row: int, slot: int) -> None:
        """Copy states to the device's `slot`, before pages are taken for whom they are: those may evict others' here.
        """
        assert self.states is not None, "states come back from where there are none"
        self.states.bring(row, slot)

    def take_moves(self) -> tuple[Moves, Moves]:
        """The copies of the step that is launched next: `outs`, then `ins`."""
        if not self._outs and not self._returning:
            return (), ()
        outs, ins = tuple(self._outs), tuple(self._ins)
        self.moved_out += len(outs)
        self.moved_in += len(ins)
        self._launched.update(self._arriving)
        self._returned += self._returning
        self._outs, self._ins, self._returning = [], [], []
        self._arriving = {}
        return outs, ins

    def settle(self) -> None:
        """The copies that were taken last were launched: pages can be found, and what came back is let go."""
        if self._launched:
            self.pages.publish(list(self._launched.values()), list(self._launched), 0, len(self._launched))
            self.pages.release(list(self._launched.values()))
            self._launched = {}
        if self._returned:
            self.pages.release(self._returned)
            self._returned = []

    def clear(self) -> None:
        """Forget all copies, launched or not, but for what sequences stored: those are dropped one by one."""
        self.pages.release([*self._arriving.values(), *self._launched.values(), *self._returning, *self._returned])
        self._outs, self._ins, self._returning, self._returned = [], [], [], []
        self._arriving, self._launched = {}, {}
        self.pages.clear_cache()
        if self.states is not None:
            self.states.clear()

    def check(self, stored: Sequence[Stored]) -> None:
        """Raise AssertionError unless the pages are exactly those of `stored` sequences and of copies under way."""
        keyed = [*self._arriving.values(), *self._launched.values()]
        self.pages.check([*(each.pages for each in stored), keyed, self._returning, self._returned])
        assert set(self._arriving.values()) <= {target for _, target in self._outs}, "a page arrives that nothing fills"
        if self.states is not None:
            rows = [each.state for each in stored if each.state is not None]
            assert len(rows) == len(stored), "pages are stored without their states"
            self.states.check(rows, lambda key: self._known(key) is not None)

    def _move_out(self, page: int, host: int) -> None:
        self._outs.append((page, host))
        if self.drafted is not None:
            self.drafted.moved_out(page, host)

    def _known(self, key: bytes) -> int | None:
        if self.pages.index is None:
            return None
        for known in (self._arriving.get(key), self._launched.get(key)):
            if known is not None:
                return known
        return self.pages.index.page_of(key)
