"""The host pool's books: what is stored, found and given up, and that the integrity check finds what it is for."""

from __future__ import annotations

import random

import pytest

from stoker_runtime.kvcache.host_pool import HostPool, Stored

SIZE = 4
KEYS = [bytes([i]) * 16 for i in range(200)]


def pool(pages: int = 4, *, caching: bool = True, page_tokens: float = 0.0) -> HostPool:
    return HostPool(pages, SIZE, prefix_caching=caching, page_tokens=page_tokens)


def launch(of: HostPool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """A step takes the moves and is launched."""
    outs, ins = of.take_moves()
    of.settle()
    return list(outs), list(ins)


def test_a_sequence_is_stored_and_comes_back() -> None:
    host = pool()
    stored = host.store([10, 11, 12], KEYS[:2], 0, 9)
    assert stored is not None
    assert (stored.first, stored.positions) == (0, 9)
    assert launch(host) == ([(10, stored.pages[0]), (11, stored.pages[1]), (12, stored.pages[2])], [])
    host.check([stored])
    host.hold(list(stored.pages))
    host.bring(list(stored.pages), [20, 21, 22], stored)
    host.check([])
    outs, ins = host.take_moves()
    assert (outs, ins) == ((), tuple(zip(stored.pages, [20, 21, 22], strict=True)))
    assert host.pages.used == 3, "pages that come back are held until that step was launched"
    host.settle()
    assert host.pages.used == 0
    assert host.match(KEYS[:3], 3, 0) == list(stored.pages[:2]), "full pages stay cached"
    host.check([])


def test_what_is_not_launched_cannot_be_found() -> None:
    host = pool()
    host.evicted(7, KEYS[0])
    assert host.match(KEYS, 1, 0) == []
    host.take_moves()
    assert host.match(KEYS, 1, 0) == []
    host.settle()
    assert len(host.match(KEYS, 1, 0)) == 1


def test_a_page_that_is_there_is_not_copied_again() -> None:
    host = pool()
    host.evicted(7, KEYS[0])
    first = host.store([7, 8], KEYS[:2], 0, 8)
    second = host.store([7, 8], KEYS[:2], 0, 8)
    assert first is not None
    assert first == second
    assert len(launch(host)[0]) == 2
    third = host.store([3, 4, 5], KEYS[:2], 0, 10)
    assert third is not None
    assert third.pages[:2] == first.pages
    assert launch(host)[0] == [(5, third.pages[2])]
    host.check([first, first, third])
    for stored in (first, first, third):
        host.drop(stored)
    host.check([])


def test_a_full_pool_gives_up_what_is_only_cached() -> None:
    host = pool(3)
    for at in range(3):
        host.evicted(at, KEYS[at])
        launch(host)
    host.evicted(9, KEYS[0])
    assert launch(host) == ([], []), "used again: it is the newest now"
    stored = host.store([20, 21], KEYS[50:52], 0, 8)
    assert stored is not None
    launch(host)
    assert host.match(KEYS, 1, 0), "the least recently used went first"
    assert not host.match(KEYS, 3, 1)
    assert host.store([30, 31], [], 0, 8) is None, "what sequences stored is not given up"
    host.check([stored])


def test_without_room_an_evicted_page_is_gone() -> None:
    host = pool(1)
    stored = host.store([1], [], 0, 3)
    assert stored is not None
    host.evicted(2, KEYS[0])
    assert launch(host)[0] == [(1, stored.pages[0])]
    host.drop(stored)
    host.check([])


@pytest.mark.parametrize(("page_tokens", "positions", "kept"), [(3.0, 9, True), (3.5, 9, False), (3.5, 12, True)])
def test_moving_has_to_pay(page_tokens: float, positions: int, kept: bool) -> None:
    host = pool(page_tokens=page_tokens)
    assert (host.store([1, 2, 3], [], 0, positions) is not None) == kept
    shared = pool(page_tokens=page_tokens)
    assert (shared.store([1, 2, 3], [], 5, 20 + positions) is not None) == kept, "shared tokens are not counted"


def test_pages_that_are_computed_sooner_are_not_kept() -> None:
    host = pool(page_tokens=SIZE + 0.5)
    host.evicted(1, KEYS[0])
    assert host.store([1], [], 0, SIZE) is None
    assert launch(host) == ([], [])


def test_without_prefix_caching_nothing_stays() -> None:
    host = pool(caching=False)
    stored = host.store([1, 2], [], 0, 7)
    assert stored is not None
    launch(host)
    host.drop(stored)
    assert host.match(KEYS, 2, 0) == []
    assert host.pages.available == 4


def test_clear_forgets_what_is_on_its_way_too() -> None:
    host = pool(8)
    host.evicted(1, KEYS[0])
    host.take_moves()
    host.evicted(2, KEYS[1])
    stored = host.store([3, 4], KEYS[2:4], 0, 8)
    assert stored is not None
    host.drop(stored)
    host.clear()
    host.check([])
    assert launch(host) == ([], [])
    assert host.pages.available == 8
    assert host.match(KEYS, 4, 0) == []


@pytest.mark.parametrize("harm", [lambda h, s: h.drop(s), lambda h, s: h.hold(s.pages) or h._returning.clear()])
def test_check_finds_harm(harm: object) -> None:
    host = pool()
    stored = host.store([1, 2], KEYS[:1], 0, 6)
    assert stored is not None
    harm(host, stored)  # type: ignore[operator]
    with pytest.raises(AssertionError, match="wrong reference count"):
        host.check([stored])


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_random_calls_lose_nothing(seed: int, caching: bool) -> None:
    """Content is followed through every copy: what comes back is what was stored or cached under that key."""
    rng, host = random.Random(seed), pool(12, caching=caching)
    device: dict[int, object] = {}
    memory: dict[int, object] = {}
    stored: list[tuple[Stored, list[object]]] = []
    for _ in range(600):
        choice = rng.random()
        if choice < 0.35:
            start, count = rng.randrange(20), rng.randint(1, 4)
            pages = rng.sample(range(100), count)
            full = rng.randint(0, count) if caching else 0
            content = [KEYS[start + at] if at < full else object() for at in range(count)]
            device.update(zip(pages, content, strict=True))
            found = host.store(pages, KEYS[start : start + full], 0, count * SIZE)
            if found is not None:
                stored.append((found, content))
        elif choice < 0.55 and caching:
            page, key = rng.randrange(100), KEYS[rng.randrange(20)]
            device[page] = key
            host.evicted(page, key)
        elif choice < 0.65 and stored:
            host.drop(stored.pop(rng.randrange(len(stored)))[0])
        moved = rng.random() < 0.3
        expected: dict[int, object] = {}
        if moved and stored:
            each, content = stored.pop(rng.randrange(len(stored)))
            host.hold(each.pages)
            host.bring(each.pages, range(200, 200 + len(each.pages)), each)
            expected = dict(zip(range(200, 204), content, strict=False))
        host.check([each for each, _ in stored])
        outs, ins = host.take_moves()
        memory.update({target: device[source] for source, target in outs})
        device.update({target: memory[source] for source, target in ins})
        assert all(device[page] == content for page, content in expected.items())
        host.check([each for each, _ in stored])
        host.settle()
        for at in range(20):
            for page in host.match(KEYS, at + 1, at):
                assert memory[page] == KEYS[at]
        host.check([each for each, _ in stored])
    for each, _ in stored:
        host.drop(each)
    host.check([])
    assert host.pages.available == 12
