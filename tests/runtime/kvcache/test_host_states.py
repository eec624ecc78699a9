"""States on the host: whose rows they are, which give way, and that a step never overwrites what it brings back."""

from __future__ import annotations

import random

import pytest

from stoker_runtime.kvcache.host_states import HostStates

A, B, C = b"a", b"b", b"c"


def test_what_is_stored_stays_and_what_has_a_key_gives_way() -> None:
    states = HostStates(2)
    first = states.store(5)
    states.keep(A, 9)
    assert first is not None
    second = states.store(6)
    assert second is not None
    assert states.row_of(A) is None, "the prefix gave its row to a sequence"
    assert states.store(7) is None
    assert states.take_moves() == (((5, first), (6, second)), ())
    states.drop(first)
    assert states.store(7) == first


def test_the_one_looked_up_last_stays() -> None:
    states = HostStates(2)
    for at, key in enumerate((A, B)):
        states.keep(key, at)
    assert states.row_of(A) is not None
    states.keep(C, 2)
    assert [states.row_of(key) is not None for key in (A, B, C)] == [True, False, True]


def test_nothing_goes_where_the_step_reads() -> None:
    states = HostStates(1)
    states.keep(A, 3)
    states.take_moves()
    row = states.row_of(A)
    assert row is not None
    states.bring(row, 1)
    # Its page goes in the same step, and others want the row.
    states.page_given_up(A)
    assert states.store(2) is None
    assert states.take_moves() == ((), ((row, 1),))
    assert states.store(2) == row


@pytest.mark.parametrize("seed", range(40))
def test_random_steps_bring_back_what_went_out(seed: int) -> None:
    rng = random.Random(seed)
    states, host = HostStates(rng.randint(1, 5)), dict[int, int]()
    stored: dict[int, int] = {}
    keyed: dict[bytes, int] = {}
    clock = 0
    for _ in range(60):
        wanted: dict[int, int] = {}
        contents = {row: rng.getrandbits(30) for row in range(20)}
        for _ in range(rng.randint(0, 5)):
            clock += 1
            action = rng.randrange(5)
            if action == 0 and (row := states.store(source := rng.randrange(20))) is not None:
                stored[row] = contents[source]
            elif action == 1:
                key, source = bytes([rng.randrange(8)]), rng.randrange(20)
                known = states.row_of(key)
                states.keep(key, source)
                if known is None and states.row_of(key) is not None:
                    keyed[key] = contents[source]
            elif action == 2 and stored:
                row = rng.choice(sorted(stored))
                if rng.random() < 0.7:
                    wanted[clock] = stored[row]
                    states.bring(row, clock)
                states.drop(row)
                del stored[row]
            elif action == 3 and (row := states.row_of(key := bytes([rng.randrange(8)]))) is not None:
                wanted[clock] = keyed[key]
                states.bring(row, clock)
            elif action == 4:
                states.page_given_up(bytes([rng.randrange(8)]))
        states.check(stored, lambda key: True)
        outs, ins = states.take_moves()
        host |= {row: contents[source] for source, row in outs}
        assert {slot: host[row] for row, slot in ins} == wanted
    for row in stored:
        states.drop(row)
    states.clear()
    states.check((), lambda key: False)
