"""One port, and several processes that accept from it: each connection goes to one that has the fewest.

All of them listen on one socket and are woken by a new connection. Who has more open connections than another that
accepts, or as many after more turns, leaves it alone for a moment; so of a few dozen connections every process gets its
share, where the kernel's spreading by addresses gives one of four twice that. A process that hangs costs a new
connection that moment alone, and after half a second nothing.

Invariants: a connection that nobody has taken waits in the one queue, whoever dies. Counts are those of the board.
Knows nothing of what is spoken.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
import ssl
from collections.abc import Callable
from time import monotonic

from stoker_runtime.process.board import Board

PATIENCE_SECONDS = 0.02
"""How long a connection is left to those who have fewer; then one is taken all the same."""
LOOK_SECONDS = 0.001
"""How often it is looked meanwhile whether they took it, or now have more."""
RETRY_SECONDS = 1.0
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""The system has no room for another connection now."""

log = logging.getLogger(__name__)


class EvenPort:
    """One process's side of the port. Use from its event loop."""

    def __init__(self, listener: socket.socket, board: Board) -> None:
        """`listener` is the socket that all of them have; `board` tells how many connections each has."""
        listener.setblocking(False)
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._board = board
        self._make: Callable[[], asyncio.Protocol] | None = None
        self._tls: ssl.SSLContext | None = None
        self._connections = 0
        self._turns = 0
        self._patient_until = 0.0
        self._beginning: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None) -> None:
        """Accept from now on: each connection gets a protocol of `make`, which calls `lost` when it is over."""
        self._make, self._tls = make, tls
        self._turns = self._board.most_turns
        self.tell()
        self._listen()

    def lost(self) -> None:
        """A connection is over."""
        self._connections -= 1
        self.tell()

    def close(self) -> None:
        """Accept no more; open connections go on."""
        if self._make is None:
            return
        self._make = None
        self.tell()
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def tell(self) -> None:
        """Say how many connections there are; now and then, for who is silent is passed over."""
        self._board.accept(self._connections if self._make is not None else None, self._turns, monotonic())

    def _listen(self) -> None:
        self._timer = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _listen_later(self, seconds: float, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._timer = loop.call_later(seconds, then)

    def _accept(self) -> None:
        """Take connections while it is this process's turn."""
        while self._board.my_turn(monotonic()):
            if not self._take():
                return
        if self._somebody_waits():
            self._patient_until = monotonic() + PATIENCE_SECONDS
            self._listen_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Somebody waited for another process: whether it is so still."""
        now = monotonic()
        if self._somebody_waits() and not self._board.my_turn(now):
            if now < self._patient_until:
                self._listen_later(LOOK_SECONDS, self._look)
                return
            if not self._take():
                return
        self._listen()

    def _somebody_waits(self) -> bool:
        return bool(self._poll.poll(0))

    def _take(self) -> bool:
        """Accept one connection; whether more may be accepted now."""
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return self._timer is not None  # who looks goes on to listen
        except OSError as error:
            if error.errno not in _SHORT:
                raise
            log.error("no connection can be accepted for %g s: %s", RETRY_SECONDS, error.strerror)
            self._listen_later(RETRY_SECONDS, self._listen)
            return False
        self._begin(accepted)
        return True

    def _begin(self, accepted: socket.socket) -> None:
        self._connections += 1
        self._turns += 1
        self.tell()
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.create_task(self._connect(accepted))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        make = self._make
        if make is None:
            accepted.close()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, accepted, ssl=self._tls)
        except OSError as error:  # those of TLS too: somebody who speaks otherwise, or left
            log.debug("a connection did not begin: %s", error)
            accepted.close()
            self.lost()
