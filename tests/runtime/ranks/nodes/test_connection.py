"""Frames arrive whole and in order, and one that the other node did not make is never taken for its."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from stoker_runtime.ranks.nodes.connection import HEADER, Connection, Lost
from stoker_runtime.ranks.nodes.frames import decode_lives, encode_lives
from stoker_runtime.ranks.watch import SILENT_SECONDS, Life, Silence

Sockets = tuple[socket.socket, socket.socket]
KEYS = (b"one direction", b"the other")


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    yield mine, theirs
    mine.close()
    theirs.close()


def both(sockets: Sockets) -> tuple[Connection, Connection]:
    return Connection(sockets[0], *KEYS), Connection(sockets[1], *reversed(KEYS))


def test_what_is_received_is_what_was_sent_in_both_directions(sockets: Sockets) -> None:
    ends = both(sockets)
    frames = [(random.randrange(256), random.randbytes(random.choice([0, 1, 70, 5000, 3_000_000]))) for _ in range(30)]
    got: dict[int, list[tuple[int, bytes]]] = {}

    def receive(at: int) -> None:
        got[at] = [ends[at].receive() for _ in frames]

    readers = [threading.Thread(target=receive, args=(at,)) for at in (0, 1)]
    for reader in readers:
        reader.start()
    senders = [threading.Thread(target=lambda end=end: [end.send(*frame) for frame in frames]) for end in ends]  # type: ignore[misc]
    for thread in senders:
        thread.start()
    for thread in (*senders, *readers):
        thread.join()
    assert got == {0: frames, 1: frames}


@pytest.mark.parametrize("fault", ["changed", "repeated", "of another kind", "without the key", "reflected"])
def test_a_frame_that_the_node_did_not_make_ends_the_connection(fault: str, sockets: Sockets) -> None:
    """Somebody between the nodes sends what he has seen, or what he likes."""
    between, peer = sockets
    victim = Connection(peer, *reversed(KEYS))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        writer = Connection(socket.create_connection(listener.getsockname()), *KEYS)
        tap, _ = listener.accept()
    payload = random.randbytes(random.randint(1, 40))
    writer.send(7, payload)
    seen = bytearray(tap.recv(4096))
    if fault == "repeated":
        between.sendall(seen)
        assert victim.receive() == (7, payload)
    elif fault == "changed":
        seen[-1] ^= 1 << random.randrange(8)
    elif fault == "of another kind":
        seen[4] = 8
    elif fault == "without the key":
        seen[5 : HEADER.size] = bytes(16)
    else:
        victim.send(7, payload)
        seen = bytearray(between.recv(4096))
    between.sendall(seen)
    with pytest.raises(Lost, match="did not make"):
        victim.receive()
    writer.close()
    tap.close()


def test_the_end_of_a_connection_is_told_from_both_sides(sockets: Sockets) -> None:
    mine, theirs = both(sockets)
    mine.send(1, b"last")
    mine.finish()
    assert theirs.receive() == (1, b"last")
    with pytest.raises(Lost, match="closed"):
        theirs.receive()
    theirs.send(2)
    assert mine.receive() == (2, b"")
    theirs.close()
    for _ in range(2):
        mine.offer(3)  # to nobody: no error
        theirs.offer(3)
    with pytest.raises(Lost):
        mine.receive()


def test_what_is_offered_to_who_does_not_read_waits_for_nobody(sockets: Sockets) -> None:
    mine, theirs = both(sockets)
    began = time.monotonic()
    for _ in range(20_000):
        mine.offer(17, bytes(1000))
    assert time.monotonic() - began < 60
    assert theirs.has_unread
    mine.finish()
    count = 0
    with suppress(Lost):
        while theirs.receive() == (17, bytes(1000)):
            count += 1
    assert 0 < count < 20_000


def test_lives_are_read_as_they_were_written() -> None:
    lives = [Life(random.random() < 0.5, random.random() * 1e6) for _ in range(random.randint(1, 9))]
    assert decode_lives(encode_lives(lives)) == lives


def test_silence_counts_in_ticks_and_only_where_nothing_came() -> None:
    silence, tick = Silence(0.25), 0.25
    times = [at * tick for at in range(1000)]
    assert not any(silence.tick(now, heard=at % 30 == 0) for at, now in enumerate(times))
    silent = Silence(0.25)
    told = next(now for now in times if silent.tick(now, heard=False))
    assert SILENT_SECONDS < told <= SILENT_SECONDS + 2 * tick
    stalled = Silence(0.25)
    assert not any(stalled.tick(now, heard=False) for now in (0.0, 1e3, 2e3, 3e3))
