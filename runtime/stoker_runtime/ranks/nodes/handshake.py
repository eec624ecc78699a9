"""Who is let in: two nodes show each other that they know the secret, without saying it, and have the same terms.

    node   → leader   magic, its number, 32 random bytes
    leader → node     magic, 32 random bytes
    node   → leader   HMAC-SHA256 (RFC 2104) of both, by the secret
    leader → node     another one, or zeros: that was not the secret
    node   → leader   its terms, as the first frame
    leader → node     WELCOME with where ranks meet, or REFUSED with why

The leader shows nothing to whoever has shown nothing. Keys of the frames are made of the secret and all random bytes.

Invariants: who is slow to show that it knows the secret is left after PATIENCE_SECONDS. Every refusal names what
differs, and never a secret.
Knows nothing of what comes after.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from dataclasses import dataclass

from stoker_runtime.ranks.nodes.connection import Connection, Lost, reason_of
from stoker_runtime.ranks.nodes.terms import difference

PATIENCE_SECONDS = 10.0
MAGIC = b"stoker nodes 1\n"
CHANCE = 32
PROOF = 32
REFUSED_PROOF = bytes(PROOF)
NUMBER = struct.Struct("<I")

WELCOME, REFUSED, JOIN = 1, 2, 3


class Refusal(Exception):
    """Why two nodes do not go together. `passing`: they may in a while."""

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


@dataclass(frozen=True, slots=True)
class Applicant:
    """A node that knows the secret, and waits for an answer."""

    number: int
    terms: dict[str, str]
    connection: Connection

    def refuse(self, refusal: Refusal) -> None:
        """Say why it is not let in, and end the connection."""
        answer = {"message": str(refusal), "passing": refusal.passing}
        self.connection.offer(REFUSED, json.dumps(answer).encode())
        self.connection.finish()
        self.connection.close()


def hear(peer: socket.socket, secret: bytes) -> Applicant:
    """The leader's side, up to its answer. Raises Refusal for another secret, Lost for what is no node."""
    peer.settimeout(PATIENCE_SECONDS)
    try:
        hello = _read(peer, len(MAGIC) + NUMBER.size + CHANCE)
        if not hello.startswith(MAGIC):
            raise Lost("it does not speak as a node of this version")
        (number,) = NUMBER.unpack_from(hello, len(MAGIC))
        chance = secrets.token_bytes(CHANCE)
        peer.sendall(MAGIC + chance)
        both = hello + chance
        if not hmac.compare_digest(_read(peer, PROOF), _proof(secret, b"node", both)):
            peer.sendall(REFUSED_PROOF)
            raise Refusal(f"node {number} is refused: it presents another secret")
        peer.sendall(_proof(secret, b"leader", both))
    except OSError as error:
        raise Lost(reason_of(error)) from error
    connection = Connection(peer, _proof(secret, b"from the leader", both), _proof(secret, b"from the node", both))
    kind, payload = connection.receive()
    if kind != JOIN:
        raise Lost("it does not say what it has")
    return Applicant(number, json.loads(payload), connection)


def judge(applicant: Applicant, terms: dict[str, str]) -> None:
    """Raises Refusal where a node's terms are not the leader's."""
    found = difference(terms, applicant.terms)
    if found:
        raise Refusal(f"node {applicant.number} is refused: {found}.")


def present(
    peer: socket.socket, secret: bytes, number: int, terms: dict[str, str]
) -> tuple[Connection, dict[str, int]]:
    """The other node's side: the connection, and what the leader's welcome says. Raises Refusal, or Lost."""
    peer.settimeout(PATIENCE_SECONDS)
    try:
        hello = MAGIC + NUMBER.pack(number) + secrets.token_bytes(CHANCE)
        peer.sendall(hello)
        answer = _read(peer, len(MAGIC) + CHANCE)
        if not answer.startswith(MAGIC):
            raise Refusal("What listens there is no leader of this version.")
        both = hello + answer[len(MAGIC) :]
        peer.sendall(_proof(secret, b"node", both))
        proof = _read(peer, PROOF)
    except OSError as error:
        raise Lost(reason_of(error)) from error
    if not hmac.compare_digest(proof, _proof(secret, b"leader", both)):
        who = "The leader refuses this node's secret" if proof == REFUSED_PROOF else "The leader has another secret"
        raise Refusal(f"{who}; it must be the same on all nodes.")
    connection = Connection(peer, _proof(secret, b"from the node", both), _proof(secret, b"from the leader", both))
    connection.send(JOIN, json.dumps(terms).encode())
    kind, payload = connection.receive()
    told = json.loads(payload)
    if kind == REFUSED:
        raise Refusal(told["message"], passing=told["passing"])
    return connection, told


def _proof(secret: bytes, what: bytes, both: bytes) -> bytes:
    return hmac.digest(secret, what + both, "sha256")


def _read(peer: socket.socket, count: int) -> bytes:
    """Exactly so many bytes. Raises Lost when the other side ends before."""
    found = b""
    while len(found) < count:
        part = peer.recv(count - len(found))
        if not part:
            raise Lost("it has closed the connection")
        found += part
    return found
