"""Connections of one client over four API processes: each has its share, whoever came late, left or hangs."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from api_server import wait_until
from server_process import UNIFORM, ServerProcess, children

from stoker_runtime.process.board import ACCEPTED, ROW_BYTES, Board
from stoker_runtime.serve import even

PROCESSES = 4
TLS = Path(__file__).parent / "tls"
GET = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
RANDOM = random.Random()


def server_of_four(*flags: str) -> ServerProcess:
    return ServerProcess([sys.executable, str(UNIFORM), "ok"], "--api-server-count", str(PROCESSES), *flags)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    found = server_of_four()
    yield found.wait_ready()
    found.close()


def api_pids(server: ServerProcess) -> list[int]:
    return [pid for name, pid in children(server.popen.pid).items() if name.startswith("api")]


def port_of(server: ServerProcess) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


def shares(server: ServerProcess, clients: list[socket.socket]) -> Counter[int]:
    """How many of these connections each process holds, by the system's own tables."""
    mine = {client.getsockname()[1] for client in clients}
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (int(fields[at].split(":")[1], 16) for at in (1, 2))
        if local == port_of(server) and remote in mine:
            inodes.add(f"socket:[{fields[9]}]")
    found = Counter(dict.fromkeys(api_pids(server), 0))
    for pid in found:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found[pid] += link.is_symlink() and os.readlink(link) in inodes
    return found


def connect(server: ServerProcess) -> socket.socket:
    """A connection that stays, once it was answered."""
    client = socket.create_connection(("127.0.0.1", port_of(server)), timeout=30)
    client.sendall(GET)
    assert b" 200 " in client.recv(4096).splitlines()[0]
    return client


def connected(server: ServerProcess, count: int, at_once: int) -> list[socket.socket]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda _: connect(server), range(count)))


def close(clients: list[socket.socket]) -> None:
    for client in clients:
        client.close()


def gone(server: ServerProcess, clients: list[socket.socket]) -> None:
    """Close connections, and wait until their processes know."""
    before = shares(server, clients)
    assert sum(before.values()) == len(clients)
    known = {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in before}
    close(clients)
    assert wait_until(
        lambda: all(len(list(Path(f"/proc/{pid}/fd").iterdir())) <= known[pid] - before[pid] for pid in before)
    )


def assert_even(found: Counter[int], count: int) -> None:
    """Nobody has more than twice the share of four, nor less than half of it."""
    print(sorted(found.values()))
    assert sum(found.values()) == count
    assert len(found) == PROCESSES
    assert count / PROCESSES / 2 <= min(found.values()) <= max(found.values()) <= 2 * count / PROCESSES


@pytest.mark.parametrize("at_once", [1, 16])
def test_each_process_has_its_share(server: ServerProcess, at_once: int) -> None:
    count = RANDOM.randrange(12, 90)
    clients = connected(server, count, at_once)
    try:
        assert_even(shares(server, clients), count)
    finally:
        gone(server, clients)


def test_a_burst_is_shared_too(server: ServerProcess) -> None:
    """Connections that all wait at once, none of them answered before the last was asked for."""
    count = RANDOM.randrange(100, 400)
    clients = [socket.socket() for _ in range(count)]
    try:
        for client in clients:
            client.setblocking(False)
            assert client.connect_ex(("127.0.0.1", port_of(server))) in (0, errno.EINPROGRESS)
        for client in clients:
            client.settimeout(30)
            client.sendall(GET)
        assert all(b" 200 " in client.recv(4096).splitlines()[0] for client in clients)
        assert_even(shares(server, clients), count)
    finally:
        gone(server, clients)


def test_short_connections_go_around(server: ServerProcess) -> None:
    before = busy_turns(server)
    for _ in range(24):
        connect(server).close()
    turns = [now - then for now, then in zip(busy_turns(server), before, strict=True)]
    assert sum(turns) >= 24
    assert max(turns) <= 16


def busy_turns(server: ServerProcess) -> list[int]:
    """Connections that each process was given so far, by the board that they share."""
    pid = api_pids(server)[0]
    file = next(link for link in Path(f"/proc/{pid}/fd").iterdir() if _is_board(link))
    board = Board.mapped(os.open(file, os.O_RDWR), PROCESSES, 0)
    return [int(row[ACCEPTED]) for row in board._rows]


def _is_board(link: Path) -> bool:
    return "stoker-" in os.readlink(link) and link.stat().st_size == PROCESSES * ROW_BYTES


def test_who_lost_connections_gets_the_next(server: ServerProcess) -> None:
    count = RANDOM.randrange(24, 60)
    clients = connected(server, count, 4)
    chosen = RANDOM.choice(api_pids(server))
    held = [client for client in clients if shares(server, [client])[chosen]]
    rest = [client for client in clients if client not in held]
    gone(server, held)
    fresh = connected(server, len(held), 1)
    try:
        assert shares(server, fresh)[chosen] >= len(held) / 2
        assert_even(shares(server, rest + fresh), count)
    finally:
        gone(server, rest + fresh)


def test_a_process_that_hangs_takes_no_connection_with_it(server: ServerProcess) -> None:
    hung = RANDOM.choice(api_pids(server))
    os.kill(hung, signal.SIGSTOP)
    try:
        clients = connected(server, 40, 8)
        found = shares(server, clients)
        assert found[hung] == 0
        assert max(found.values()) <= 30
    finally:
        os.kill(hung, signal.SIGCONT)
    more = connected(server, 10, 1)
    try:
        assert shares(server, more)[hung] >= 5, "it has the fewest, so the next are its own"
    finally:
        close([*clients, *more])


class Short(socket.socket):
    """A listener to which the system refuses some connections, as it does where there are too many open files."""

    refusals = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


async def test_connections_wait_while_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(even, "RETRY_SECONDS", 0.05)
    with Short() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.refusals = RANDOM.randrange(1, 4)
        refused, board, made = listener.refusals, Board(), asyncio.Semaphore(0)
        port = even.EvenPort(listener, board)

        class Answered(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.release()
                transport.close()

            def connection_lost(self, _: Exception | None) -> None:
                port.lost()

        port.open(Answered, None)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(RANDOM.randrange(1, 9))]
        for _ in clients:
            await asyncio.wait_for(made.acquire(), 10)
        assert caplog.text.count("no connection can be accepted") == refused
        assert board.most_turns == len(clients)
        close(clients)
        port.close()


def test_a_process_that_died_leaves_its_share_to_the_others(server: ServerProcess) -> None:
    os.kill(RANDOM.choice(api_pids(server)), signal.SIGKILL)
    clients = connected(server, 30, 4)
    try:
        assert sum(shares(server, clients).values()) == 30
        assert wait_until(lambda: len(api_pids(server)) == PROCESSES)
        later = [*clients]
        assert wait_until(lambda: _grows_even(server, later)), shares(server, later)
    finally:
        close(later)


def _grows_even(server: ServerProcess, clients: list[socket.socket]) -> bool:
    """Whether one more connection goes to a process that has not one of them yet, or all have some."""
    clients.append(connect(server))
    return min(shares(server, clients).values()) > 0


def test_over_tls_too(processes: list[ServerProcess]) -> None:
    flags = ("--ssl-certfile", str(TLS / "server.pem"), "--ssl-keyfile", str(TLS / "server.key"))
    processes.append(server_of_four(*flags))
    server = processes[0].wait_ready()
    context = ssl._create_unverified_context()
    # Who speaks no TLS counts for nobody.
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", port_of(server))) as plain:
            plain.sendall(GET)
            plain.settimeout(30)
            assert b" 200 " not in plain.recv(4096)

    def secure(_: int) -> ssl.SSLSocket:
        client = context.wrap_socket(socket.create_connection(("127.0.0.1", port_of(server)), timeout=30))
        client.sendall(GET)
        assert b" 200 " in client.recv(4096).splitlines()[0]
        return client

    with ThreadPoolExecutor(8) as pool:
        clients: list[socket.socket] = list(pool.map(secure, range(40)))
    try:
        assert_even(shares(server, clients), 40)
    finally:
        close(clients)
