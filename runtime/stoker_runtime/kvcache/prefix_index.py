"""Which KV page holds which prefix: chained page hashes, and the order in which cached pages are given up.

A page's key is a digest of its parent's key and its own token ids, so one key names the whole prefix up to the
page's end. The root key comes from the request's `cache_salt` and adapter: two salts, or adapters, never share a page.
Tokens that stand for an image say nothing of it, so its digest is part of every page's key that it reaches into.

Invariants: only full pages have a key; a key has one page and a page one key; idle are exactly the keyed pages that no
sequence references, least recently used first, those of sessions after all others.
Knows nothing of reference counts, sequences or devices.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from stoker_runtime.request import Image

KEY_BYTES = 16


def root_key(cache_salt: str, adapter: int = 0) -> bytes:
    """The key before the first page. `adapter` is the number of what keys and values went through, 0 for none."""
    salt = f"{adapter:x}".encode() if adapter else b""
    return blake2b(cache_salt.encode(), digest_size=KEY_BYTES, salt=salt, person=b"stoker-prefix").digest()


def extend_keys(
    keys: list[bytes], tokens: array[int], page_size: int, root: bytes, images: Sequence[Image] = ()
) -> None:
    """Append to `keys` one key per full page of `tokens` that has none yet; `images` stand among the tokens.

    The digest is cryptographic: a caller who could make two prefixes collide could read another's cache.
    """
    parent = keys[-1] if keys else root
    view = memoryview(tokens)
    for start in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        digest = blake2b(parent, digest_size=KEY_BYTES)
        digest.update(view[start : start + page_size])
        for image in images:
            if image.at < start + page_size and start < image.end:
                digest.update(image.digest + image.at.to_bytes(8, "little"))
        parent = digest.digest()
        keys.append(parent)


class PrefixIndex:
    """The map from keys to pages, and the LRU of pages that may be given up."""

    def __init__(self, num_pages: int) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._lasting: OrderedDict[int, None] = OrderedDict()
        """Idle pages of sessions, given up after all others; at most half of all pages."""
        self._of_sessions: set[int] = set()

    @property
    def idle_count(self) -> int:
        """Pages that can be given up."""
        return len(self._idle) + len(self._lasting)

    def keep(self, page: int) -> None:
        """A keyed page belongs to a session: it outlives those that do not."""
        self._of_sessions.add(page)

    def page_of(self, key: bytes) -> int | None:
        """The page that holds this prefix, or None."""
        return self._page_of.get(key)

    def match(self, keys: list[bytes], limit: int, start: int = 0) -> list[int]:
        """The pages of the longest cached run of `keys[start:limit]`."""
        pages: list[int] = []
        for key in keys[start:limit]:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, page: int, key: bytes) -> bool:
        """Give `page` its key; False when another page already holds this prefix or `page` has a key."""
        if key in self._page_of or self._key_of[page] is not None:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def is_keyed(self, page: int) -> bool:
        """Whether the page's content is cached, so that nobody may write to it."""
        return self._key_of[page] is not None

    def is_idle(self, page: int) -> bool:
        """Whether the page is cached and unreferenced."""
        return page in self._idle or page in self._lasting

    def rest(self, page: int) -> None:
        """The last reference to a keyed page went away: it becomes the most recently used idle page."""
        if page not in self._of_sessions:
            self._idle[page] = None
            return
        self._lasting[page] = None
        if len(self._lasting) > len(self._key_of) // 2:
            oldest, _ = self._lasting.popitem(last=False)
            self._of_sessions.discard(oldest)
            self._idle[oldest] = None

    def wake(self, page: int) -> None:
        """A sequence references an idle page again."""
        del (self._lasting if page in self._lasting else self._idle)[page]

    def evict(self) -> tuple[int, bytes]:
        """Give up the least recently used idle page; it, and the key that it had. KeyError when there is none."""
        page, _ = (self._idle or self._lasting).popitem(last=False)
        return page, self._forget(page)

    def clear(self) -> list[int]:
        """Forget every key and return the pages that were idle."""
        pages = [*self._idle, *self._lasting]
        self._idle.clear()
        self._lasting.clear()
        self._of_sessions.clear()
        self._page_of.clear()
        self._key_of = [None] * len(self._key_of)
        return pages

    def check(self, references: list[int]) -> None:
        """Raise AssertionError unless the invariants hold, given every page's reference count."""
        for key, page in self._page_of.items():
            assert self._key_of[page] == key, f"page {page} lost its key"
        keyed = [page for page, key in enumerate(self._key_of) if key is not None]
        assert len(keyed) == len(self._page_of), "a page has a key that does not name it"
        idle = {page for page in keyed if references[page] == 0}
        resting = set(self._idle) | set(self._lasting)
        assert idle == resting, f"idle pages differ: {idle ^ resting}"
        assert not set(self._idle) & set(self._lasting), "a page rests twice"
        assert set(self._lasting) <= self._of_sessions <= set(keyed), "pages of sessions differ"

    def _forget(self, page: int) -> bytes:
        key = self._key_of[page]
        assert key is not None, f"idle page {page} has no key"
        del self._page_of[key]
        self._key_of[page] = None
        self._of_sessions.discard(page)
        return key
