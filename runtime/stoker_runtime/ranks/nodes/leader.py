"""The other nodes, as the leader holds them: let in, told of each step, heard of, ended.

Invariants: a node that has joined and is lost ends the group. Nobody is let in who does not know the secret or has
other terms, which the log says by name; a node is let in once.
Knows nothing of what is told, and of the ranks of its own machine.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import EngineError
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.ranks.nodes.connection import Connection, Lost
from stoker_runtime.ranks.nodes.frames import BEAT, END, FAULT, READY, STEP, decode_lives
from stoker_runtime.ranks.nodes.handshake import WELCOME, Applicant, Refusal, hear, judge
from stoker_runtime.ranks.nodes.network import interface_of, listen
from stoker_runtime.ranks.nodes.secret import read_secret
from stoker_runtime.ranks.nodes.terms import terms_of
from stoker_runtime.ranks.watch import WATCH_SECONDS, Life, Silence

POLL_SECONDS = 0.02
REMIND_SECONDS = 30.0
LOOPBACK_ADDRESS, EVERYWHERE = "127.0.0.1", ("0.0.0.0", "::")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Node:
    """A node that has joined, and what its ranks' lives were at its last beat."""

    connection: Connection
    address: str
    lives: list[Life]
    silence: Silence = field(default_factory=lambda: Silence(WATCH_SECONDS))
    has_ended: bool = False
    """As it was told."""


class Nodes:
    """The nodes beside the leader's."""

    def __init__(self, config: EngineConfig, secret: bytes, listener: socket.socket, rendezvous: socket.socket) -> None:
        """`rendezvous` is where ranks meet later."""
        self._config = config
        self._secret = secret
        self._terms = terms_of(config)
        self._listener = listener
        self._rendezvous = rendezvous
        self._nodes: dict[int, Node] = {}
        self._joining = threading.Lock()
        self._interface = ""
        self._fault = ""
        self._ending = False
        self._readers: list[threading.Thread] = []
        threading.Thread(target=self._accept, name="stoker-nodes", daemon=True).start()

    @classmethod
    def open(cls, config: EngineConfig) -> Nodes:
        """Let nodes join from now on. Raises ConfigError for a secret that is missing, or a port that is taken."""
        secret = read_secret(config)
        listener = listen(config.master_addr, config.master_port)
        rendezvous = listen(config.master_addr, 0)
        return cls(config, secret, listener, rendezvous)

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined."""
        return [number for number in range(1, self._config.nnodes) if number not in self._nodes]

    def gather(self, check: Callable[[], None]) -> Meeting:
        """Wait until all have joined; `check` is called meanwhile, and may raise. Raises EngineError."""
        began = due = time.monotonic()
        while missing := self.missing:
            check()
            now = time.monotonic()
            if now - began > self._config.node_join_seconds:
                raise EngineError(
                    f"Of {self._config.nnodes} nodes {_named(missing)} did not join within "
                    f"{self._config.node_join_seconds} s; see their own logs, and whether they reach "
                    f"{self._config.master_addr}:{self._config.master_port}."
                )
            if now >= due:
                due = now + REMIND_SECONDS
                log.info("nodes: the leader waits for %s of %d", _named(missing), self._config.nnodes)
            time.sleep(POLL_SECONDS)
        self._stop_listening()
        log.info("nodes: all %d are there", self._config.nnodes)
        host, port = self._rendezvous.getsockname()[:2]
        # Whoever leads keeps the store, which takes the listener over, and asks it by an address of its own.
        return Meeting(
            host=LOOPBACK_ADDRESS if host in EVERYWHERE else host,
            port=port,
            listener=self._rendezvous.detach(),
            interface=self._interface,
        )

    def write(self, message: bytes) -> None:
        """Tell every rank of every node. Raises Lost for a node that is gone."""
        for node in self._nodes.values():
            node.connection.send(STEP, message)

    def ready(self) -> None:
        """All ranks are ready."""
        for node in self._nodes.values():
            with suppress(Lost):  # who reads finds out
                node.connection.send(READY)

    def tick(self, now: float) -> str | None:
        """Call every WATCH_SECONDS: tells the nodes that the leader lives; the reason, once one is lost."""
        for number, node in list(self._nodes.items()):
            if node.has_ended:
                continue
            node.connection.offer(BEAT)
            if node.silence.tick(now, heard=node.connection.has_unread) and not self._fault:
                return f"node {number} ({node.address}) has not been heard of for {node.silence.seconds:.0f} s"
        return self._fault or None

    def lives(self) -> list[Life]:
        """Of all other nodes' ranks, in their order."""
        return [life for number in sorted(self._nodes) for life in self._nodes[number].lives]

    def end(self, reason: str) -> None:
        """The ranks end, for this reason."""
        self._ending = True
        self._stop_listening()
        for node in list(self._nodes.values()):
            node.connection.offer(END, reason.encode())
            node.connection.close()

    def close(self, patience: float) -> None:
        """The ranks were told to end: wait up to `patience` seconds until their nodes have seen it. Idempotent."""
        self._ending = True
        self._stop_listening()
        deadline = time.monotonic() + patience
        for node in list(self._nodes.values()):
            node.connection.finish()
        for reader in list(self._readers):
            reader.join(max(0.0, deadline - time.monotonic()))
        for node in list(self._nodes.values()):
            node.connection.close()
        self._rendezvous.close()

    def _stop_listening(self) -> None:
        with suppress(OSError):  # it is closed already
            # A thread that waits in accept does not notice that its socket is closed.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, address = self._listener.accept()
            except OSError:
                return  # closed
            reader = threading.Thread(target=self._meet, args=(peer, address[0]), name="stoker-node", daemon=True)
            self._readers.append(reader)
            reader.start()

    def _meet(self, peer: socket.socket, address: str) -> None:
        """Let one in, or refuse it; then hear it until it is gone."""
        try:
            own = peer.getsockname()[0]
            applicant = hear(peer, self._secret)
            node = self._admit(applicant, address, own)
        except (Refusal, Lost, ValueError) as error:
            log.warning("nodes: %s: %s", address, error)
            peer.close()
            return
        try:
            while True:
                kind, payload = node.connection.receive()
                node.silence.heard()
                if kind == BEAT:
                    node.lives = decode_lives(payload)
                elif kind == FAULT:
                    self._lose(applicant.number, node, payload.decode())
                elif kind == END:
                    node.has_ended = True
                    return
        except Lost as error:
            self._lose(applicant.number, node, f"is gone: {error}")

    def _admit(self, applicant: Applicant, address: str, own: str) -> Node:
        try:
            judge(applicant, self._terms)
            with self._joining:
                number = applicant.number
                if self._ending or number not in self.missing:
                    there = self._nodes.get(number)
                    where = f"from {there.address}" if there else "or is none of the group"
                    raise Refusal(f"node {number} is refused: it has joined already, {where}", passing=True)
                self._interface = self._interface or interface_of(own)
                share = self._config.local_ranks
                node = Node(applicant.connection, address, [Life(False, 0.0)] * share)
                welcome = {"port": self._rendezvous.getsockname()[1]}
                applicant.connection.send(WELCOME, json.dumps(welcome).encode())
                self._nodes[number] = node
        except Refusal as refusal:
            applicant.refuse(refusal)
            raise
        log.info("nodes: node %d has joined from %s", number, address)
        return node

    def _lose(self, number: int, node: Node, what: str) -> None:
        if not self._ending and not self._fault:
            self._fault = f"node {number} ({node.address}) {what}"


def _named(numbers: list[int]) -> str:
    """Nodes in words."""
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
