"""Tells the journal of the prefix cache which pages of a sequence are cached now.

Knows nothing of who reads it.
"""

from __future__ import annotations

from stoker_runtime.kvcache.journal import CacheJournal, PagesCached
from stoker_runtime.scheduler.sequence import Sequence


def note_cached(journal: CacheJournal, sequence: Sequence, fresh: list[int], size: int) -> None:
    """Note the pages number `fresh` of a sequence, of `size` tokens each: a run of neighbours at a time."""
    keys, request, at = sequence.keys, sequence.request, 0
    while at < len(fresh):
        start = stop = fresh[at]
        while at < len(fresh) and fresh[at] == stop:
            at, stop = at + 1, stop + 1
        parent = keys[start - 1] if start else None
        tokens = sequence.tokens[start * size : stop * size]
        cached = tuple(keys[start:stop])
        journal.cached(PagesCached(cached, parent, tokens, size, request.adapter, request.cache_salt))
