"""Who is let in, and what both sides say of who is not."""

from __future__ import annotations

import random
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from stoker_runtime.ranks.nodes.connection import Lost
from stoker_runtime.ranks.nodes.handshake import WELCOME, Refusal, hear, judge, present

TERMS = {"version": "1", "the model's files": "a", "seed": "0"}


def meet(leader: Callable[[socket.socket], Any], node: Callable[[socket.socket], Any]) -> list[Any]:
    """What each side returns or raises."""
    found: list[Any] = [None, None]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()

    def run(at: int, act: Callable[[socket.socket], Any], end: socket.socket) -> None:
        try:
            found[at] = act(end)
        except (Refusal, Lost) as error:
            found[at] = error
            end.close()

    threads = [threading.Thread(target=run, args=given) for given in ((0, leader, theirs), (1, node, mine))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    mine.close()
    theirs.close()
    return found


def answering(secret: bytes, terms: dict[str, str]) -> Callable[[socket.socket], Any]:
    def act(peer: socket.socket) -> Any:
        applicant = hear(peer, secret)
        try:
            judge(applicant, terms)
        except Refusal as refusal:
            applicant.refuse(refusal)
            raise
        applicant.connection.send(WELCOME, b'{"port": 17}')
        return applicant

    return act


def test_two_that_know_the_secret_and_have_the_same_terms_go_together() -> None:
    secret, number = secrets.token_bytes(20), random.randrange(1, 1000)
    applicant, answer = meet(answering(secret, TERMS), lambda peer: present(peer, secret, number, dict(TERMS)))
    assert (applicant.number, applicant.terms) == (number, TERMS)
    assert answer[1] == {"port": 17}


def test_another_secret_is_named_by_both_sides_and_shown_by_none() -> None:
    mine, theirs = secrets.token_bytes(20), secrets.token_bytes(20)
    refused, refusal = meet(answering(mine, TERMS), lambda peer: present(peer, theirs, 3, TERMS))
    assert str(refused) == "node 3 is refused: it presents another secret"
    assert "must be the same on all nodes" in str(refusal)
    assert not refusal.passing


@pytest.mark.parametrize(
    ("name", "says"),
    [("version", "it runs stoker 2"), ("the model's files", "its model is another one"), ("seed", "--seed")],
)
def test_other_terms_are_named(name: str, says: str) -> None:
    secret = secrets.token_bytes(20)
    changed = TERMS | {name: "2"}
    refused, refusal = meet(answering(secret, TERMS), lambda peer: present(peer, secret, 2, changed))
    assert says in str(refused)
    assert str(refusal) == str(refused)


def test_who_only_repeats_what_it_has_seen_is_not_let_in() -> None:
    secret = secrets.token_bytes(20)
    sent: list[bytes] = []

    class Tapped:
        """A socket that keeps what was sent."""

        def __init__(self, peer: socket.socket) -> None:
            self._peer = peer

        def sendall(self, data: bytes) -> None:
            sent.append(data)
            self._peer.sendall(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._peer, name)

    def repeat(peer: socket.socket) -> bytes:
        peer.sendall(sent[0])
        peer.recv(100)
        peer.sendall(sent[1])
        return peer.recv(32)

    meet(answering(secret, TERMS), lambda peer: present(Tapped(peer), secret, 1, TERMS))  # type: ignore[arg-type]
    refused, got = meet(answering(secret, TERMS), repeat)
    assert "another secret" in str(refused)
    assert got == bytes(32)


def test_a_leader_that_does_not_know_the_secret_gets_nothing() -> None:
    secret = secrets.token_bytes(20)

    def pretend(peer: socket.socket) -> bytes:
        hello = peer.recv(200)
        peer.sendall(hello[:15] + secrets.token_bytes(32))
        peer.recv(32)
        peer.sendall(secrets.token_bytes(32))
        return peer.recv(1)

    told, refusal = meet(pretend, lambda peer: present(peer, secret, 1, TERMS))
    assert "The leader has another secret" in str(refusal)
    assert told == b""


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n" + bytes(60), b"", b"stoker nodes 1\n"], ids=["HTTP", "nothing", "half"]
)
def test_what_is_no_node_is_left(said: bytes) -> None:
    def speak(peer: socket.socket) -> None:
        with suppress(OSError):  # it is left before it has ended
            peer.sendall(said)
            peer.shutdown(socket.SHUT_WR)

    left, _ = meet(answering(secrets.token_bytes(20), TERMS), speak)
    assert isinstance(left, Lost)
