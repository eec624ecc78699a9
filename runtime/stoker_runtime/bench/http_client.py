"""One keep-alive connection that posts completions and reads their streams with as little work as can be.

Invariants: a request's answer is read to its end before the next is sent; every byte of a chunked body passes the
decoder, so a stream that is cut short is an error, never a short answer.
Knows nothing of load or of statistics. HTTP/1.1: RFC 9112, chunked coding of section 7.1.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


class LoadError(Exception):
    """An answer that is not what was asked for."""


def said_by(body: bytes) -> str:
    """The server's own words of an error's body, or its beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """An answer's status and headers, their names in lower case. Raises what a closed connection raises."""
    raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in raw[1:] if line)
    return int(raw[0].split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}


@dataclass(slots=True)
class Result:
    """One finished request. `arrivals` are the times of its events that carry tokens, in seconds of the clock."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    finish: str = ""


class Connection:
    """A connection of one closed-loop client."""

    def __init__(self, host: str, port: int, headers: dict[str, str]) -> None:
        self._address = (host, port)
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        self._head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\n{''.join(lines)}content-length: "
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def complete(self, body: bytes) -> Result:
        """Post `body` and read the stream. Raises LoadError or OSError."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        result = Result(time.perf_counter())
        self._writer.write(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
        status, headers = await read_head(self._reader)
        if status != 200:
            raise LoadError(f"status {status}: {said_by(await self._read_plain(self._reader, headers))}")
        await self._read_events(self._reader, result)
        result.ended = time.perf_counter()
        return result

    def close(self) -> None:
        """Drop the connection."""
        if self._writer is not None:
            self._writer.close()

    async def _read_plain(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        return await reader.readexactly(int(headers.get("content-length", "0")))

    async def _read_events(self, reader: asyncio.StreamReader, result: Result) -> None:
        """Read chunks to the last; each event ends with an empty line, wherever the chunks cut it."""
        pending = b""
        done = False
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pending += (await reader.readexactly(size + 2))[:-2]
            now = time.perf_counter()
            *events, pending = pending.split(b"\n\n")
            for event in events:
                done = event == b"data: [DONE]"
                if not done:
                    _take(event, now, result)
        await reader.readexactly(2)
        if not done or pending:
            raise LoadError("the stream ended without [DONE]")


def _take(event: bytes, now: float, result: Result) -> None:
    # Most events carry a token and no news: only those that end something are parsed.
    if b'"finish_reason":null' in event and b'"error"' not in event:
        result.arrivals.append(now)
        return
    payload: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    if "error" in payload:
        raise LoadError(str(payload["error"]["message"]))
    for choice in payload["choices"]:
        if choice["text"]:
            result.arrivals.append(now)
        result.finish = choice["finish_reason"] or result.finish
    if payload.get("usage"):
        result.prompt_tokens = payload["usage"]["prompt_tokens"]
        result.tokens = payload["usage"]["completion_tokens"]
