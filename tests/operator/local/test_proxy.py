"""One port for several pods: round-robin, streams that stay with their pod, and pods that went away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from stoker_operator.local.controllers import free_ports
from stoker_operator.local.proxy import Proxy

HOST = "127.0.0.1"


class Backend:
    """Answers its name, then echoes until the client's half is closed."""

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        self.server = await asyncio.start_server(self.serve, HOST, 0)
        return HOST, int(self.server.sockets[0].getsockname()[1])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.name)
        while block := await reader.read(100):
            writer.write(block)
        writer.write(b"!")
        writer.close()


@pytest.fixture
async def backends() -> AsyncIterator[list[tuple[str, int]]]:
    servers = [Backend("a"), Backend("b")]
    yield [await server.start() for server in servers]
    for server in servers:
        assert server.server is not None
        server.server.close()


@pytest.fixture
async def proxy(backends: list[tuple[str, int]]) -> AsyncIterator[Proxy]:
    (port,) = free_ports(1)
    made = Proxy(HOST, port, lambda: backends)
    await made.start()
    yield made
    await made.stop()


async def ask(proxy: Proxy, text: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    writer.write(text)
    writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


async def test_connections_are_dealt_in_turn_and_half_closed_ones_get_their_answer(proxy: Proxy) -> None:
    answers = [await ask(proxy, b"hello") for _ in range(4)]
    assert sorted(answers) == [b"ahello!", b"ahello!", b"bhello!", b"bhello!"]


async def test_a_pod_that_just_went_away_is_passed_over(proxy: Proxy, backends: list[tuple[str, int]]) -> None:
    backends[0] = (HOST, free_ports(1)[0])
    assert [await ask(proxy) for _ in range(3)] == [b"b!"] * 3


async def test_an_open_stream_outlives_its_pods_readiness(proxy: Proxy, backends: list[tuple[str, int]]) -> None:
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    await reader.readexactly(1)
    backends.clear()
    proxy.refuse()
    writer.write(b"still")
    assert await asyncio.wait_for(reader.readexactly(5), 5) == b"still"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(proxy.host, proxy.port)
    writer.close()


async def test_with_no_pod_a_connection_ends(proxy: Proxy, backends: list[tuple[str, int]]) -> None:
    backends.clear()
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
