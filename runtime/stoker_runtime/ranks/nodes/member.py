"""A node beside the leader's: it joins, starts its ranks, passes on what the leader tells, and tells how they fare.

    1. it asks the leader again and again until it is let in
    2. its ranks start, and meet those of all nodes
    3. a message of the leader's goes into the ring that they read; their lives go back with each beat
    4. the leader tells them to end, or one of them ends, or the leader is lost: then all of them end

Invariants: its ranks never outlive the connection. One thread does all of it but for the beats, and is the parent of
the ranks, which end with it.
Knows nothing of what ranks are told, but for the message that ends them.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, EngineError
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import places
from stoker_runtime.ranks.nodes.connection import GONE_SECONDS, Connection, Lost, reason_of
from stoker_runtime.ranks.nodes.frames import BEAT, END, FAULT, READY, STEP, encode_lives
from stoker_runtime.ranks.nodes.handshake import Refusal, present
from stoker_runtime.ranks.nodes.network import interface_of
from stoker_runtime.ranks.nodes.secret import read_secret
from stoker_runtime.ranks.nodes.terms import terms_of
from stoker_runtime.ranks.team import COMMAND, Team
from stoker_runtime.ranks.watch import WATCH_SECONDS, Silence
from stoker_runtime.ranks.wire import STOP, command

FIRST_WAIT, LONGEST_WAIT = 0.1, 2.0
STOP_SECONDS = 5.0

log = logging.getLogger(__name__)


class Member:
    """The node. `run` does its work; the rest may be asked from any thread."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = COMMAND, team: type[Team] = Team) -> None:
        """Raises ConfigError for a secret that is missing."""
        self.detail = "it waits for the leader"
        """What it is about, for whoever asks."""
        self.ready = False
        """Whether all ranks of all nodes are."""
        self._config = config
        self._secret = read_secret(config)
        self._command = command
        self._make_team = team
        self._fault = ""
        self._silence = Silence(WATCH_SECONDS)
        self._left = threading.Event()
        self._ended = threading.Event()
        self._connection: Connection | None = None

    def run(self) -> None:
        """Return when the leader has ended the ranks. Raises ConfigError when it refuses this node; EngineError."""
        try:
            connection, port = self._join()
            log.info("nodes: node %d has joined the leader", self._config.node_rank)
            self.detail = "its ranks load the model"
            self._serve(connection, port)
        finally:
            self.ready = False
            self.detail = "its ranks have ended"

    def leave(self) -> None:
        """End the ranks, and with them the whole group."""
        self._left.set()
        self._lose("was asked to end")

    def _join(self) -> tuple[Connection, int]:
        """The connection, once the leader lets this node in, and the port where ranks meet."""
        config, terms = self._config, terms_of(self._config)
        where = f"{config.master_addr}:{config.master_port}"
        deadline = time.monotonic() + config.node_join_seconds
        wait, said = FIRST_WAIT, ""
        while not self._left.is_set():
            try:
                peer = socket.create_connection((config.master_addr, config.master_port), GONE_SECONDS)
                try:
                    connection, told = present(peer, self._secret, config.node_rank, terms)
                    return connection, told["port"]
                except BaseException:
                    peer.close()
                    raise
            except Refusal as refusal:
                if not refusal.passing:
                    raise ConfigError(f"The leader at {where}: {refusal}", param="master_addr") from refusal
                reason = str(refusal)
            except Lost as lost:
                reason = str(lost)
            except OSError as error:
                reason = reason_of(error)
            if reason != said:
                said = reason
                log.info("nodes: node %d waits for the leader at %s: %s", config.node_rank, where, reason)
            if time.monotonic() > deadline:
                raise EngineError(f"No leader at {where} within {config.node_join_seconds} s: {reason}.")
            self._left.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        raise EngineError("The node was asked to end before it joined.")

    def _serve(self, connection: Connection, port: int) -> None:
        config = self._config
        every = places(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            whole_experts=config.enable_expert_parallel,
            nodes=config.nnodes,
        )
        team = self._make_team([place for place in every if place.node == config.node_rank], self._command)
        try:
            self._connection = connection
            interface = interface_of(connection.own_address)
            team.tell(config, Meeting(host=config.master_addr, port=port, interface=interface))
            watching = threading.Thread(target=self._watch, args=(connection, team), name="stoker-ranks", daemon=True)
            watching.start()
            stopped = self._follow(connection, team)
            self._ended.set()
            team.close(STOP_SECONDS if stopped else 0.0)
            if stopped:
                with suppress(Lost):  # the leader has not waited
                    connection.send(END)
            else:
                raise EngineError(f"The ranks of node {config.node_rank} end: {self._fault}.")
        finally:
            self._ended.set()
            team.close(0.0)
            connection.close()

    def _follow(self, connection: Connection, team: Team) -> bool:
        """Pass on what the leader tells, until it ends; whether it has told its ranks to stop."""
        stop = command(STOP)
        try:
            while True:
                kind, payload = connection.receive()
                self._silence.heard()
                if kind == STEP:
                    if payload == stop:
                        self._ended.set()
                    team.write(payload, self._check)
                    if payload == stop:
                        return True
                elif kind == READY:
                    self.ready, self.detail = True, ""
                    log.info("nodes: all ranks are ready")
                elif kind == END:
                    self._fault = self._fault or f"the leader says: {payload.decode()}"
        except Lost as lost:
            self._fault = self._fault or f"the leader is gone: {lost}"
            return False

    def _check(self) -> None:
        """Raises Lost once the ranks end, for whoever waits for them to read."""
        if self._fault:
            raise Lost(self._fault)

    def _watch(self, connection: Connection, team: Team) -> None:
        reason = None
        with team.deaths() as next_death:
            while reason is None:
                connection.offer(BEAT, encode_lives(team.lives()))
                reason = next_death(WATCH_SECONDS)
                if self._ended.is_set():
                    return
                # In its start the leader's process may well be kept from saying anything: it imports torch.
                silent = self.ready and self._silence.tick(time.monotonic(), heard=connection.has_unread)
                if reason is None and silent:
                    reason = f"the leader has not been heard of for {self._silence.seconds:.0f} s"
        log.critical("%s; all ranks end", reason)
        self._lose(f"reports: {reason}")

    def _lose(self, what: str) -> None:
        """Tell the leader what befell this node, and end it."""
        connection = self._connection
        self._fault = self._fault or what
        if connection is not None:
            connection.offer(FAULT, what.encode())
            connection.close()
