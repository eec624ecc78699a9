"""turns.py: so many at a time, whatever comes, and everybody in the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_operator.cluster.queue import Key
from stoker_operator.cluster.turns import Turns

A, B, C, D = (("ns", name) for name in "abcd")


def test_the_next_is_the_one_that_waits_the_longest() -> None:
    turns = Turns(2, patience=0)
    assert [turns.ask(key) for key in (A, B, C, D, C)] == [True, True, False, False, False]
    assert turns.ask(A), "who has a turn keeps it"
    assert turns.held == ("ns/a", "ns/b")
    assert turns.leave(C) is None
    assert turns.leave(A) == C
    assert turns.ask(C)
    assert turns.leave(B) == D


def test_who_will_not_ask_again_does_not_wait() -> None:
    turns = Turns(1, patience=0)
    assert [turns.ask(key) for key in (A, B, C)] == [True, False, False]
    assert turns.forget(B) is None
    assert turns.leave(A) == C


def test_who_was_under_way_before_a_restart_counts() -> None:
    now = [100.0]
    turns = Turns(1, patience=30, clock=lambda: now[0])
    assert not turns.ask(A), "everybody is looked at first"
    turns.take(B)
    now[0] = 131.0
    assert not turns.ask(A)
    assert turns.leave(B) == A
    assert turns.ask(A)


def test_nought_is_no_limit() -> None:
    turns = Turns(0)
    assert all(turns.ask(("ns", str(number))) for number in range(50))


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=80))
def test_never_more_than_so_many_and_nobody_is_forgotten(parallel: int, steps: list[tuple[int, bool]]) -> None:
    turns, asked, woken = Turns(parallel, patience=0), set[Key](), set[Key]()
    for number, leaves in steps:
        key = ("ns", str(number))
        if leaves:
            after = turns.leave(key)
            asked.discard(key)
            if after is not None:
                woken.add(after)
        elif turns.ask(key):
            asked.discard(key)
            woken.discard(key)
        else:
            asked.add(key)
        assert len(turns.held) <= parallel
    while turns.held or woken:  # each that has a turn leaves, each that is woken asks
        for key in sorted(woken):
            if turns.ask(key):
                woken.discard(key)
                asked.discard(key)
        for name in turns.held:
            after = turns.leave(("ns", name.partition("/")[2]))
            if after is not None:
                woken.add(after)
    assert not asked
