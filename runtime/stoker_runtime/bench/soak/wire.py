"""HTTP as badly as clients speak it: kept or fresh connections, streams read slowly, requests left half-way.

Invariants: whoever asks gets an answer that was read to its end, or an exception; a connection that was left is closed.
Knows nothing of what is asked. HTTP/1.1: RFC 9112, chunked coding of section 7.1.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stoker_runtime.bench.http_client import read_head, said_by
from stoker_runtime.errors import ConfigError

SMALL_BUFFER = 1024
"""Bytes that a slow reader lets wait on its side before the server's writes have to."""
GONE = (OSError, asyncio.IncompleteReadError)
"""What a connection raises that its server closed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return json.loads(self.body)

    @property
    def said(self) -> str:
        """The server's own words, or the beginning of its answer."""
        return said_by(self.body)


class Wire:
    """One client's connection. `ask` keeps it; `leave` closes it, whatever is under way."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url!r} is no http:// address of a server", param="url")
        self._address = (parts.hostname, parts.port or 80)
        self._key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(
        self, method: str, path: str, body: object = None, kind: str = "application/json", *, slow: bool = False
    ) -> Answer:
        """Send one request and read its answer to the end. `body` is bytes, or what JSON can say."""
        begun = await self.begin(method, path, body, kind, slow=slow)
        pieces = [piece async for piece in begun.pieces()]
        return Answer(begun.status, begun.headers, b"".join(pieces))

    async def begin(
        self, method: str, path: str, body: object = None, kind: str = "application/json", *, slow: bool = False
    ) -> Begun:
        """Send one request and read the head of its answer. Raises what a broken connection raises."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._address[0]}\r\n{self._key}"
        head += f"content-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
        kept = self._writer is not None and not slow
        try:
            return await self._send(head.encode() + data, slow)
        except GONE:
            # A kept connection may have been closed by the server since its last answer; a fresh one was not.
            self.leave()
            if not kept:
                raise
            return await self._send(head.encode() + data, slow)

    async def send_part(self, path: str, promised: int, part: bytes) -> None:
        """Send the head of a POST of `promised` bytes and only a part of them."""
        _, writer = await self._open(slow=False)
        head = f"POST {path} HTTP/1.1\r\nhost: {self._address[0]}\r\n{self._key}content-length: {promised}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + part)
        await writer.drain()

    async def _send(self, data: bytes, slow: bool) -> Begun:
        reader, writer = await self._open(slow=slow)
        writer.write(data)
        status, headers = await read_head(reader)
        return Begun(status, headers, reader, self)

    async def _open(self, *, slow: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if slow:
            self.leave()
        if self._reader is None or self._writer is None:
            limit = SMALL_BUFFER if slow else 2**20
            self._reader, self._writer = await asyncio.open_connection(*self._address, limit=limit)
        return self._reader, self._writer

    def leave(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer whose head has come."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader
    wire: Wire

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Left before its end, the connection must be left too."""
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            yield await self.reader.readexactly(int(self.headers.get("content-length", "0")))
        else:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        if self.headers.get("connection", "").lower() == "close":
            self.wire.leave()

    async def rest(self) -> Answer:
        """The whole answer."""
        return Answer(self.status, self.headers, b"".join([piece async for piece in self.pieces()]))

    async def events(self, pause: float = 0.0) -> AsyncIterator[str]:
        """The data of each server-sent event as it comes, waiting `pause` seconds after each."""
        pending = b""
        async for piece in self.pieces():
            *whole, pending = (pending + piece).split(b"\n\n")
            for event in whole:
                data = [line[5:].strip() for line in event.decode().split("\n") if line.startswith("data:")]
                yield "\n".join(data)
                if pause:
                    await asyncio.sleep(pause)
