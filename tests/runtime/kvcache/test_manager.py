"""Allocation, sharing, copy-on-write, eviction; and that the integrity check finds what it is for."""

from __future__ import annotations

import random

import pytest

from stoker_runtime.kvcache.manager import PageManager

KEYS = [bytes([i]) * 16 for i in range(64)]


def test_pages_for_counts_a_part_of_a_page() -> None:
    manager = PageManager(4, 16)
    assert [manager.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_allocate_and_release() -> None:
    manager = PageManager(4, 16)
    pages = manager.allocate(3)
    assert len(set(pages)) == 3
    assert (manager.available, manager.used) == (1, 3)
    manager.check([pages])
    manager.release(pages)
    assert (manager.available, manager.used) == (4, 0)
    manager.check([])


def test_released_pages_stay_cached_until_they_are_needed() -> None:
    manager = PageManager(3, 16)
    pages = manager.allocate(2)
    manager.publish(pages, KEYS, 0, 2)
    manager.release(pages)
    assert manager.available == 3
    assert manager.match(KEYS[:2], 2) == pages
    manager.allocate(2)
    assert manager.match(KEYS[:2], 2) == pages[:1], "the end of a prefix is given up before its start"


def test_acquired_pages_are_shared() -> None:
    manager = PageManager(4, 16)
    pages = manager.allocate(2)
    manager.publish(pages, KEYS, 0, 2)
    assert manager.idle_among(pages) == 0
    manager.acquire(pages)
    manager.check([pages, pages])
    manager.release(pages)
    assert manager.used == 2
    manager.release(pages)
    assert manager.used == 0
    assert manager.idle_among(pages) == 2
    manager.acquire(pages)
    manager.check([pages])


def test_shared_and_cached_pages_are_copied_before_a_write() -> None:
    manager = PageManager(4, 16)
    [page] = manager.allocate(1)
    assert manager.is_writable(page)
    manager.publish([page], KEYS, 0, 1)
    assert not manager.is_writable(page)
    copy = manager.copy_on_write(page)
    assert copy != page
    assert manager.is_writable(copy)
    with pytest.raises(AssertionError, match="needs no copy"):
        manager.copy_on_write(copy)


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    manager = PageManager(2, 16, prefix_caching=False)
    pages = manager.allocate(2)
    manager.publish(pages, KEYS, 0, 2)
    manager.release(pages)
    assert manager.match(KEYS[:2], 2) == []
    manager.check([])


def test_clear_cache_frees_pages_at_rest_and_leaves_those_in_use() -> None:
    manager = PageManager(4, 16)
    kept, gone = manager.allocate(1), manager.allocate(1)
    manager.publish(kept, KEYS, 0, 1)
    manager.publish(gone, KEYS[1:], 0, 1)
    manager.release(gone)
    manager.clear_cache()
    manager.check([kept])
    assert manager.match(KEYS[:1], 1) == []
    manager.release(kept)
    manager.check([])


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda m, p: m.release(p[:1]), "wrong reference count"),
        (lambda m, p: m.allocate(1), "wrong reference count"),
        (lambda m, p: m._free.pop(), "lost"),
        (lambda m, p: m._free.append(p[0]), "referenced"),
        (lambda m, p: m._free.append(m._free[0]), "twice"),
    ],
)
def test_check_finds_harm(harm: object, text: str) -> None:
    manager = PageManager(4, 16)
    pages = manager.allocate(2)
    harm(manager, pages)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=text):
        manager.check([pages])


def test_a_page_cannot_be_released_twice() -> None:
    manager = PageManager(2, 16)
    pages = manager.allocate(1)
    manager.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        manager.release(pages)


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_keep_the_books_right(seed: int) -> None:
    rng, manager = random.Random(seed), PageManager(24, 4)
    held: list[list[int]] = []
    for _ in range(400):
        choice = rng.random()
        if choice < 0.4 and (count := rng.randint(1, 4)) <= manager.available:
            held.append(manager.allocate(count))
        elif choice < 0.6 and held:
            pages, start = rng.choice(held), rng.randrange(50)
            manager.publish(pages, KEYS[start:], 0, len(pages))
        elif choice < 0.75:
            start = rng.randrange(60)
            pages = manager.match(KEYS[start : start + 4], 4)
            if pages and len(set(pages)) == len(pages):
                manager.acquire(pages)
                held.append(pages)
        elif held:
            manager.release(held.pop(rng.randrange(len(held))))
        manager.check(held)
    for pages in held:
        manager.release(pages)
    manager.check([])
    assert manager.available == 24
