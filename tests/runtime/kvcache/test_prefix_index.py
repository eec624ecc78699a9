"""Chained keys, matching, and the order in which cached pages are given up."""

from __future__ import annotations

from array import array

import pytest

from stoker_runtime.kvcache.prefix_index import PrefixIndex, extend_keys, root_key

ROOT = root_key("")


def keys_of(*tokens: int, page_size: int = 2, root: bytes = ROOT) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, array("i", tokens), page_size, root)
    return keys


def test_only_full_pages_have_keys() -> None:
    assert len(keys_of(1, 2, 3, 4)) == 2
    assert len(keys_of(1, 2, 3)) == 1
    assert keys_of(1) == []


def test_keys_grow_as_tokens_do() -> None:
    tokens, keys = array("i", [1, 2, 3]), []
    extend_keys(keys, tokens, 2, ROOT)
    tokens.extend([4, 5, 6])
    extend_keys(keys, tokens, 2, ROOT)
    assert keys == keys_of(1, 2, 3, 4, 5, 6)


def test_a_key_names_the_whole_prefix() -> None:
    assert keys_of(1, 2, 3, 4)[0] == keys_of(1, 2, 9, 9)[0]
    assert keys_of(1, 2, 3, 4)[1] != keys_of(9, 9, 3, 4)[1]


def test_salts_share_nothing() -> None:
    assert keys_of(1, 2) != keys_of(1, 2, root=root_key("tenant"))


def test_match_stops_at_the_first_missing_page() -> None:
    index, keys = PrefixIndex(8), keys_of(1, 2, 3, 4, 5, 6)
    index.publish(3, keys[0])
    index.publish(5, keys[2])
    assert index.match(keys, 3) == [3]
    index.publish(4, keys[1])
    assert index.match(keys, 3) == [3, 4, 5]
    assert index.match(keys, 2) == [3, 4]


def test_a_prefix_has_one_page_and_a_page_one_prefix() -> None:
    index, keys = PrefixIndex(8), keys_of(1, 2, 3, 4)
    assert index.publish(0, keys[0])
    assert not index.publish(1, keys[0])
    assert not index.publish(0, keys[1])
    assert not index.is_keyed(1)


def test_eviction_takes_the_page_at_rest_for_longest() -> None:
    index, keys = PrefixIndex(8), keys_of(1, 2, 3, 4, 5, 6)
    for page, key in enumerate(keys):
        index.publish(page, key)
        index.rest(page)
    index.wake(0)
    index.rest(0)
    assert [index.evict()[0] for _ in range(3)] == [1, 2, 0]
    assert index.match(keys, 3) == []
    with pytest.raises(KeyError):
        index.evict()


def test_pages_of_sessions_are_given_up_last_and_are_at_most_half() -> None:
    index, keys = PrefixIndex(8), keys_of(*range(1, 15))
    for page, key in enumerate(keys):
        index.publish(page, key)
        if page < 5:
            index.keep(page)
        index.rest(page)
    index.check([0] * 8)
    assert index.idle_count == 7
    # Page 0 is one of too many, so it rests among the others, behind none of them yet.
    assert [index.evict()[0] for _ in range(3)] == [0, 5, 6]
    index.wake(2)
    index.rest(2)
    index.check([0] * 8)
    assert [index.evict()[0] for _ in range(4)] == [1, 3, 4, 2]
    assert index.idle_count == 0
    index.check([0] * 8)


def test_clear_forgets_keys_and_returns_pages_at_rest() -> None:
    index, keys = PrefixIndex(4), keys_of(1, 2, 3, 4)
    index.publish(0, keys[0])
    index.publish(1, keys[1])
    index.rest(1)
    assert index.clear() == [1]
    assert index.match(keys, 2) == []
    index.check([1, 0, 0, 0])


def test_check_finds_a_page_at_rest_that_is_referenced() -> None:
    index = PrefixIndex(2)
    index.publish(0, keys_of(1, 2)[0])
    index.rest(0)
    index.check([0, 0])
    with pytest.raises(AssertionError):
        index.check([1, 0])
