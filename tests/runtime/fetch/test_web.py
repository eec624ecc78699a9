"""Files of web servers: servers that never end, and split models."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.fetch.errors import ChecksumMismatch, FetchFailed, HubUnreachable, ModelNotFound, VolumeFull
from stoker_runtime.fetch.prefetch import Published, serve_path

Fetch = Callable[..., Published]
Serve = Callable[[Callable[[str, socket.socket], None]], str]
MIB = 1 << 20


def endless(connection: socket.socket, block: bytes = b"x" * 65536, most: int = 400 * MIB) -> None:
    """Send more than anybody should read."""
    for _ in range(most // len(block)):
        connection.sendall(block)


def peak() -> int:
    """The most memory that this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_body_that_does_not_end_is_left_where_the_promised_size_is_reached(
    fetch: Fetch, serve: Serve, tmp_path: Path
) -> None:
    sent = []

    def answer(request: str, connection: socket.socket) -> None:
        if request.startswith("HEAD"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 70001\r\nConnection: close\r\n\r\n")
            return
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        sent.append(request)
        endless(connection)

    with pytest.raises(ChecksumMismatch, match="more than the 70001 bytes"):
        fetch(uri=f"{serve(answer)}/m.gguf")
    assert len(sent) == 2
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if ".partial" in str(path)) < MIB


def test_a_body_of_no_size_that_does_not_end_does_not_fill_the_volume(
    fetch: Fetch, serve: Serve, small_volume: Path
) -> None:
    def answer(request: str, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        if not request.startswith("HEAD"):
            endless(connection)

    with pytest.raises(VolumeFull, match="tells no size"):
        fetch(uri=f"{serve(answer)}/m.gguf", dest=small_volume)
    assert not [path for path in small_volume.rglob("*") if path.is_file() and path.stat().st_size > 1000]


@pytest.mark.parametrize("scheme", ["web", "hub"])
@pytest.mark.parametrize("kind", ["headers", "one header", "redirect", "error"])
def test_an_answer_that_does_not_end_is_neither_read_nor_waited_for(
    fetch: Fetch, serve: Serve, scheme: str, kind: str
) -> None:
    def answer(request: str, connection: socket.socket) -> None:
        if kind == "headers":
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            endless(connection, b"X-More: " + b"y" * 4096 + b"\r\n")
        elif kind == "one header":
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-More: ")
            endless(connection)
        elif kind == "redirect":
            connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\n\r\n")
            endless(connection)
        else:
            connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n")
            endless(connection)

    before, began = peak(), time.monotonic()
    url = serve(answer)
    order: dict[str, Any] = {"uri": f"{url}/m.gguf"} if scheme == "web" else {"uri": "hf://a/b", "endpoint": url}
    with pytest.raises((FetchFailed, HubUnreachable)):
        fetch(**order)
    assert peak() - before < 150 * MIB
    assert time.monotonic() - began < 30


def test_a_listing_that_does_not_end_is_refused(fetch: Fetch, serve: Serve) -> None:
    def answer(request: str, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n[")
        endless(connection, b'{"type": "directory", "path": "x", "oid": "1"},' * 1000)

    before = peak()
    with pytest.raises(FetchFailed, match="where few are expected"):
        fetch(uri="hf://a/b", endpoint=serve(answer))
    assert peak() - before < 200 * MIB


@pytest.mark.parametrize("length", ["-7", "seven", "7.0", "٧", "9" * 30])
def test_a_length_that_is_none_is_no_crash(fetch: Fetch, serve: Serve, length: str) -> None:
    def answer(request: str, connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode())

    with pytest.raises((FetchFailed, HubUnreachable, VolumeFull)):
        fetch(uri=f"{serve(answer)}/m.gguf")


def test_all_parts_of_a_split_model_are_fetched_from_any_source(fetch: Fetch, hub: Any, model: Path) -> None:
    names = [f"q-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for name in names:
        (model / name).write_bytes(b"GGUF" + name.encode())
    for uri in (
        f"{hub.url}/acme/tiny/resolve/main/{names[1]}",
        f"file://{model / names[2]}",
        f"hf://acme/tiny/{names[0]}",
    ):
        published = fetch(uri=uri)
        assert sorted(published.manifest.files) == names
        assert serve_path(published).name == names[0]
    (model / names[1]).unlink()
    with pytest.raises(ModelNotFound, match=r"q-00002-of-00003\.gguf"):
        fetch(uri=f"file://{model / names[0]}", refresh=True)
    with pytest.raises(ModelNotFound, match=r"q-00002-of-00003\.gguf"):
        fetch(uri=f"{hub.url}/acme/tiny/resolve/main/{names[0]}", refresh=True)
