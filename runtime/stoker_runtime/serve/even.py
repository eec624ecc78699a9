"""One port, and several processes that accept from it: each connection goes to one that has the fewest.

All of them listen on one socket and are woken by a new connection. Who has more open connections than another that
accepts, or as many after more turns, leaves it alone for a moment; so of a few dozen connections every process gets its
share, where the kernel's spreading by addresses gives one of four twice that. Of several that wait each process takes
at once what makes its share whole, so that a burst is taken by all of them side by side. A process that hangs costs a
new connection that moment alone, and after half a second nothing.

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
import struct
from collections.abc import Callable
from time import monotonic

from stoker_runtime.process.board import Board

PATIENCE_SECONDS = 0.02
"""How long connections are left to those who have fewer; then some are taken all the same."""
LOOK_SECONDS = 0.005
"""How often it is looked meanwhile whether they took them; each new arrival is looked at besides."""
RETRY_SECONDS = 1.0
_QUEUED_AT = 24
"""Where Linux's tcp_info has `tcpi_unacked`: of a socket that listens, how many connections wait to be accepted."""
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""The system has no room for another connection now."""

log = logging.getLogger(__name__)


class EvenPort:
    """One process's side of the port. Use from its event loop."""

    def __init__(self, listener: socket.socket, board: Board) -> None:
        """`listener` is the socket that all of them have; `board` tells how many connections each has."""
        listener.setblocking(False)
        self._listener = listener
        # One event for each arrival: who leaves a connection alone is not woken by it again.
        self._arrivals = select.epoll()
        self._arrivals.register(listener, select.EPOLLIN | select.EPOLLET)
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
        asyncio.get_running_loop().remove_reader(self._arrivals)
        # First: the other processes' listener is the same file, which would go on to make events.
        self._arrivals.close()
        self._listener.close()

    def tell(self) -> None:
        """Say how many connections there are; now and then, for who is silent is passed over."""
        self._board.accept(self._connections if self._make is not None else None, self._turns, monotonic())

    def _listen(self) -> None:
        self._timer = None
        asyncio.get_running_loop().add_reader(self._arrivals, self._arrived)
        self._accept()

    def _arrived(self) -> None:
        self._arrivals.poll(0)
        self._accept()

    def _accept(self) -> None:
        """Take this process's part of what waits, and look again soon where others have left theirs."""
        while waiting := self._waiting():
            part = self._board.part_of(waiting, monotonic())
            if not part:
                if self._timer is None:
                    self._patient_until = monotonic() + PATIENCE_SECONDS
                    self._later(LOOK_SECONDS, self._look)
                return
            if not self._take(part):
                return

    def _look(self) -> None:
        """Somebody waited for another process: whether it is so still."""
        self._timer = None
        waiting, now = self._waiting(), monotonic()
        if not waiting:
            return
        part = self._board.part_of(waiting, now)
        if not part and now < self._patient_until:
            self._later(LOOK_SECONDS, self._look)
        elif self._take(part or self._board.even_part(waiting, now)):
            self._accept()

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _waiting(self) -> int:
        """How many connections nobody has accepted yet."""
        info = self._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUED_AT + 4)
        return int(struct.unpack_from("=I", info, _QUEUED_AT)[0])

    def _take(self, count: int) -> bool:
        """Accept up to `count` connections; whether more may be accepted now."""
        for _ in range(count):
            try:
                accepted, _ = self._listener.accept()
            except (ConnectionAbortedError, InterruptedError):
                continue
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in _SHORT:
                    raise
                log.error("no connection can be accepted for %g s: %s", RETRY_SECONDS, error.strerror)
                if self._timer is not None:
                    self._timer.cancel()
                asyncio.get_running_loop().remove_reader(self._arrivals)
                self._later(RETRY_SECONDS, self._listen)
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
