"""A connection between two nodes: frames, each of which shows that it was made by the node that joined, in this order.

    [length 4 | kind 1 | mark 16 | payload …]

The mark is a keyed BLAKE2b (RFC 7693) of the frame's number, kind and payload; each direction has a key of its own,
made of the secret and of what both sides chose at random. Nothing is enciphered.

A machine that is gone is told by its kernel, and by nobody's beat: keep-alives are answered however crowded it is.
TCP's own limits make a read fail a few seconds after the last answer.

Invariants: whoever reads gets whole frames, in order, or Lost. Any thread may send, one reads.
Knows nothing of what kinds mean.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from contextlib import suppress
from hashlib import blake2b

GONE_SECONDS = 3
MARK_BYTES = 16
HEADER = struct.Struct(f"<IB{MARK_BYTES}s")
NUMBER = struct.Struct("<QB")
LARGEST = 256 * 1024 * 1024


class Lost(Exception):
    """The other side is gone, or is not who it was; says how."""


class Connection:
    """One end, over a socket that is its own from now on."""

    def __init__(self, peer: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._socket = peer
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = 0
        self._received = 0
        self._sending = threading.Lock()
        notice_loss(peer)

    @property
    def own_address(self) -> str:
        """This machine's address, as the other side reaches it."""
        return str(self._socket.getsockname()[0])

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Send a frame; waits while the other side leaves no room. Raises Lost."""
        with self._sending:
            mark = mark_of(self._send_key, self._sent, kind, payload)
            self._sent += 1
            try:
                self._socket.sendall(HEADER.pack(len(payload), kind, mark) + payload)
            except OSError as error:
                raise Lost(reason_of(error)) from error

    def offer(self, kind: int, payload: bytes = b"") -> None:
        """Send a short frame where that takes no waiting; else leave it."""
        try:
            if not self._sending.locked() and select.select((), (self._socket,), (), 0)[1]:
                self.send(kind, payload)
        except (Lost, OSError, ValueError):
            pass  # it is gone, or closed here, which who reads finds out

    @property
    def has_unread(self) -> bool:
        """Whether something has come that nobody has read yet."""
        try:
            return bool(select.select((self._socket,), (), (), 0)[0])
        except (OSError, ValueError):
            return True  # closed: who reads finds out

    def receive(self) -> tuple[int, bytes]:
        """The next frame: its kind and its payload. Waits for it. Raises Lost."""
        length, kind, mark = HEADER.unpack(self._read(HEADER.size))
        if length > LARGEST:
            raise Lost(f"a frame of {length} bytes came")
        payload = self._read(length)
        if mark != mark_of(self._receive_key, self._received, kind, payload):
            raise Lost("a frame came that the node did not make")
        self._received += 1
        return kind, payload

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            try:
                part = self._socket.recv(min(count, 1 << 20), socket.MSG_WAITALL)
            except OSError as error:
                raise Lost(reason_of(error)) from error
            if not part:
                raise Lost("it has closed the connection")
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def finish(self) -> None:
        """Send nothing more; what the other side sends can still be read."""
        with suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection: reads of both sides end with it. Idempotent."""
        with suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def notice_loss(peer: socket.socket) -> None:
    """Have the system say within seconds that the other machine is gone; send small frames at once."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, GONE_SECONDS),
        (socket.TCP_USER_TIMEOUT, GONE_SECONDS * 1000),
    ):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def mark_of(key: bytes, number: int, kind: int, payload: bytes) -> bytes:
    """What shows that frame `number` was made by who knows `key`."""
    digest = blake2b(NUMBER.pack(number, kind), key=key, digest_size=MARK_BYTES)
    digest.update(payload)
    return digest.digest()


def reason_of(error: OSError) -> str:
    """What the system says, in words."""
    return error.strerror or str(error)
