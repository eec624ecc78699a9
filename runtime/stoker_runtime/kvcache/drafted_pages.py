"""Which pages hold a draft model's keys and values, too: those of all their tokens, or the page does not count.

Pages are computed by the first model in any case, and by the draft model when somebody drafts from them. A page that
is copied to the host and back takes its mark along.

Invariants: a page is marked only when the pass that fills it is part of the step being scheduled or was launched; a
blank page has no mark.
Knows nothing of sequences, and of who owns pages.
"""

from __future__ import annotations

from collections.abc import Iterable


class DraftedPages:
    """Marks of the device's pages and of the host's."""

    def __init__(self) -> None:
        self._device: set[int] = set()
        self._host: set[int] = set()

    def mark(self, pages: Iterable[int]) -> None:
        """The draft model computes all tokens of these pages of the device."""
        self._device.update(pages)

    def leading(self, pages: Iterable[int]) -> int:
        """How many of the first of `pages` are marked."""
        count = 0
        for page in pages:
            if page not in self._device:
                break
            count += 1
        return count

    def blank(self, pages: Iterable[int]) -> None:
        """These pages of the device will hold something else."""
        self._device.difference_update(pages)

    def moved_out(self, page: int, host: int) -> None:
        """A page of the device is copied to a page of the host."""
        if page in self._device:
            self._host.add(host)
        else:
            self._host.discard(host)

    def moved_in(self, host: int, page: int) -> None:
        """A page of the host is copied to a blank page of the device."""
        if host in self._host:
            self._device.add(page)

    def clear(self) -> None:
        """Nothing that was computed can be trusted."""
        self._device.clear()
        self._host.clear()
