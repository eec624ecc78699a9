"""The pages of a draft model as the device has them: an entry is a fingerprint of the true prefix up to its position.

A row that drafts reads every entry before its last two tokens, and each has to be the one of its own text; what comes
of drafts that are wrong is not, and has to be written anew before anybody reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker_runtime.step.batch import Batch, PrefillChunk

Pages = Mapping[int, int]


class DraftPages:
    """Entries by page and offset, of the device and of the host."""

    def __init__(self, num_pages: int, page_size: int, host_pages: int) -> None:
        self.page_size = page_size
        self.entries: list[list[int]] = [[0] * page_size for _ in range(num_pages)]
        self.host: list[list[int]] = [[0] * page_size for _ in range(host_pages)]
        self.caught_up = 0
        """Tokens of all chunks."""

    def move(self, batch: Batch) -> None:
        """What a batch moves and copies before its passes."""
        for page, host in batch.swap_outs:
            self.host[host] = list(self.entries[page])
        for host, page in batch.swap_ins:
            self.entries[page] = list(self.host[host])
        for source, destination in batch.copies:
            self.entries[destination] = list(self.entries[source])

    def catch_up(self, chunk: PrefillChunk, pages: Pages, true: Sequence[int]) -> None:
        """Compute a chunk of `true` tokens, which end before the sequence's last one."""
        stop = chunk.start + len(chunk.token_ids)
        assert not chunk.sample, "nothing is sampled"
        assert not chunk.targets, "nothing is scored"
        assert chunk.token_ids == tuple(true[chunk.start : stop]), "a chunk of wrong tokens"
        self._read(chunk.start, pages, true)
        self._write(chunk.start, stop, pages, true)
        self.caught_up += len(chunk.token_ids)

    def draft(self, position: int, cap: int, right: int, pages: Pages, true: Sequence[int]) -> None:
        """Draft `cap` tokens behind that at `position`, the first `right` of them those of `true`."""
        before = max(0, position - 1)
        self._read(before, pages, true)
        self._write(before, position + 1 + min(right, cap - 1), pages, true)
        for wrong in range(position + 1 + right, position + cap):
            self.entries[pages[wrong // self.page_size]][wrong % self.page_size] = -1

    def _read(self, stop: int, pages: Pages, true: Sequence[int]) -> None:
        for position in range(stop):
            found = self.entries[pages[position // self.page_size]][position % self.page_size]
            assert found == hash(tuple(true[: position + 1])), f"position {position} was never computed by the drafter"

    def _write(self, start: int, stop: int, pages: Pages, true: Sequence[int]) -> None:
        for position in range(start, stop):
            entry = hash(tuple(true[: position + 1]))
            self.entries[pages[position // self.page_size]][position % self.page_size] = entry
