"""What anybody may send before a key is asked for: bounded in bytes and in time."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator

import pytest
from api_server import CLIENT, KEY, Running, make_state, serve
from fake_engine import FakeEngine

from stoker_runtime.api.http import reading
from stoker_runtime.serve.bounds import BoundedProtocol

LINE = "GET /v1/models HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    engine = FakeEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedProtocol, "header_bytes", 9_000)
        patch.setattr(BoundedProtocol, "header_seconds", 0.7)
        patch.setattr(BoundedProtocol, "linger_seconds", 0.4)
        patch.setattr(reading, "BODY_SECONDS", 0.6)
        yield from serve(make_state(engine, api_keys=(KEY,), max_body_bytes=3_000_000), engine)


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=10)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def receive(connection: socket.socket, ending: bytes) -> bytes:
    raw = b""
    while not raw.endswith(ending):
        piece = connection.recv(65536)
        assert piece, raw
        raw += piece
    return raw


def answer(connection: socket.socket) -> tuple[int, dict[str, object]]:
    """Status and error of what comes until the connection ends."""
    raw = b""
    try:
        while piece := connection.recv(65536):
            raw += piece
    except ConnectionResetError:
        assert raw, "reset before an answer"
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "headers",
    [
        [f"x-{at}: {'v' * 100}" for at in range(200)],
        [f"x-long: {'v' * 20_000}"],
        [f"{'n' * 20_000}: v"],
        [f"cookie: {'a=b; ' * 400_000}"],
    ],
    ids=["many", "value", "name", "megabytes"],
)
def test_headers_that_are_too_many(guarded: Running, headers: list[str]) -> None:
    with connect(guarded) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall((LINE + "\r\n".join(headers) + "\r\n\r\n").encode())
        status, error = answer(connection)
    assert status == 431
    assert "9000 bytes" in str(error["message"])


def test_a_path_that_is_too_long(guarded: Running) -> None:
    with connect(guarded) as connection:
        connection.sendall(f"GET /{'p' * 10_000} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert answer(connection)[0] == 431


def test_headers_that_never_end_take_no_memory(guarded: Running) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with connect(guarded) as connection:
        connection.sendall(f"{LINE}x-endless: ".encode())
        sent, piece = 0, b"v" * 100_000
        deadline = time.monotonic() + 5
        try:
            while sent < 300_000_000 and time.monotonic() < deadline:
                sent += connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000
    assert CLIENT.get(f"{guarded.url}/health").status_code == 200


@pytest.mark.parametrize("begun", ["", "GET", LINE])
def test_headers_that_do_not_come(guarded: Running, begun: str) -> None:
    with connect(guarded) as connection:
        connection.sendall(begun.encode())
        began = time.monotonic()
        status, error = answer(connection)
    assert status == 408
    assert "0.7 seconds" in str(error["message"])
    assert time.monotonic() - began < 5


def test_headers_of_a_later_request_have_their_own_time(guarded: Running) -> None:
    with connect(guarded) as connection:
        for _ in range(3):
            connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert receive(connection, b'"}').startswith(b"HTTP/1.1 200")
            time.sleep(0.5)
        connection.sendall(b"GET /ver")
        assert answer(connection)[0] == 408


@pytest.mark.parametrize("key", [KEY, "wrong"])
@pytest.mark.parametrize("drip", [b"", b"1\r\nx\r\n"])
def test_a_body_that_never_ends(guarded: Running, key: str, drip: bytes) -> None:
    """With a wrong key it is not even read; the connection ends all the same."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(guarded) as connection:
        connection.sendall(head.encode())
        began = time.monotonic()
        connection.settimeout(0.05)
        raw, ended = b"", False
        while not ended and time.monotonic() - began < 8:
            try:
                connection.sendall(drip)
                piece = connection.recv(65536)
                raw, ended = raw + piece, not piece
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                ended = True
    assert ended, "still open"
    assert raw.startswith(b"HTTP/1.1 408" if key == KEY else b"HTTP/1.1 401")


def test_a_body_that_comes_slowly_but_comes(guarded: Running) -> None:
    """At more than the least rate time grows with the size."""
    body = json.dumps({"prompt": "hi", "max_tokens": 2, "user": "u" * 400_000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: {len(body)}\r\n"
    with connect(guarded) as connection:
        connection.sendall(f"{head}connection: close\r\n\r\n".encode())
        for at in range(0, len(body), 50_000):
            connection.sendall(body[at : at + 50_000])
            time.sleep(0.15)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_refusal_leaves_a_connection_that_may_go_on(guarded: Running) -> None:
    """A body that ends in time after a 401 keeps the connection for the next request."""
    with connect(guarded) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
        assert receive(connection, b"}}").startswith(b"HTTP/1.1 401")
        connection.sendall(b"12345GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(0.8)
        assert receive(connection, b'"}').startswith(b"HTTP/1.1 200")
