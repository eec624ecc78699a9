"""Snapshots: which prefix is found, who is given up, and that no row is lost."""

from __future__ import annotations

import random

from stoker_runtime.kvcache.snapshots import Snapshots

A, B, C, D = b"a", b"b", b"c", b"d"


def test_the_longest_prefix_with_a_snapshot_is_found() -> None:
    books = Snapshots(3, 10)
    books.save(B, 4)
    assert books.longest([A, B, C, D], 4) == 2
    assert books.longest([A, B, C, D], 1) == 0
    assert books.take_saves() == ((4, 10),)
    assert books.take_saves() == ()
    assert books.use(B) == 10


def test_the_least_used_one_is_given_up_those_of_sessions_after_all_others() -> None:
    books = Snapshots(4, 0)
    for key in (A, B, C, D):
        books.save(key, 7)
    books.use(A)
    books.keep([B, C, b"unknown"])
    books.save(b"e", 7)
    assert [key for key in (A, B, C, D) if books.longest([key], 1)] == [A, B, C]
    books.spare(b"e")
    books.save(b"f", 7)
    assert books.longest([b"e"], 1) == 0
    assert books.longest([A], 1) == 1
    # No more than half are of sessions: the one that came first is as any other then.
    books.keep([A])
    books.save(b"g", 7)
    books.save(b"h", 7)
    assert [key for key in (A, B, C) if books.longest([key], 1)] == [A, C]


def test_spare_ones_take_the_place_of_spare_ones_alone() -> None:
    books = Snapshots(2, 0)
    books.save(A, 1)
    books.save(B, 1, spare=True)
    books.save(C, 1, spare=True)
    assert [books.has(key) for key in (A, B, C)] == [True, False, True]
    books.use(C)
    books.save(D, 1, spare=True)
    assert [books.has(key) for key in (A, C, D)] == [True, True, False]
    books.save(D, 1)
    assert [books.has(key) for key in (A, C, D)] == [False, True, True]


def test_what_is_given_up_before_its_step_is_not_saved() -> None:
    books = Snapshots(1, 5)
    books.save(A, 1)
    books.save(B, 2)
    assert books.take_saves() == ((2, 5),)
    books.save(C, 3)
    books.page_given_up(C)
    assert books.take_saves() == ()
    assert books.used == 0


def test_no_row_is_lost() -> None:
    rng = random.Random(5)
    books = Snapshots(6, 3)
    cached: set[bytes] = set()
    for _ in range(4000):
        key = bytes([rng.randrange(20)])
        chance = rng.random()
        if chance < 0.4:
            cached.add(key)
            books.save(key, rng.randrange(3), spare=rng.random() < 0.3)
        elif chance < 0.6:
            cached.discard(key)
            books.page_given_up(key)
        elif chance < 0.7:
            books.keep([key])
        elif chance < 0.8:
            books.spare(key)
        elif chance < 0.81:
            books.clear()
        elif books.longest([key], 1):
            assert 3 <= books.use(key) < 9
        if rng.random() < 0.3:
            rows = [row for _, row in books.take_saves()]
            assert len(set(rows)) == len(rows)
        books.check(cached.__contains__)
        assert books.used <= 6
