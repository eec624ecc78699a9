"""Clients that stream answers one after the other, and say of each whether it came whole.

A stream is whole when every token that was asked for came and the server said that it was the end. Each request has a
connection of its own and is sent once: nothing hides behind a retry.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from e2e.scenarios.kube import eventually

_SECONDS = 180


@dataclass
class Streams:
    """What became of the requests. `running` is how many are being answered now."""

    whole: int = 0
    broken: list[str] = field(default_factory=list)
    running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def wait_running(self, count: int) -> None:
        """Until so many streams have their first token."""
        eventually(f"{count} streams run", lambda: self.running >= count or self.broken, 120, every=0.05)
        assert not self.broken, self.broken[0]

    def wait_more(self, count: int) -> None:
        """Until so many more streams came whole."""
        goal = self.whole + count
        eventually(f"{goal} streams are whole", lambda: self.whole >= goal or self.broken, 180)
        assert not self.broken, self.broken[0]

    def _work(self, base: str, model: str, tokens: int, *, once: bool) -> None:
        while not self._stop.is_set():
            try:
                self._stream(base, model, tokens)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                with self._lock:
                    self.broken.append(f"{type(error).__name__}: {error}")
            if once:
                return

    def _stream(self, base: str, model: str, tokens: int) -> None:
        address = urlsplit(base)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_SECONDS)
        body = {"model": model, "prompt": "Count:", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        first = True
        try:
            path = f"{address.path}/v1/completions"
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, f"status {answer.status}: {answer.read()[:300]!r}"
            reason, ended = "", False
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    ended = True
                elif line.startswith(b"data: "):
                    if first:
                        self._count(1)
                        first = False
                    chunk = json.loads(line[6:])
                    assert "choices" in chunk, f"the server ended the stream: {chunk}"
                    for choice in chunk["choices"]:
                        reason = choice["finish_reason"] or reason
            assert ended, "the stream was cut"
            assert reason == "length", f"the stream ended with {reason!r}"
            with self._lock:
                self.whole += 1
        finally:
            connection.close()
            if not first:
                self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self.running += change


@contextmanager
def streaming(base: str, model: str, *, clients: int = 20, tokens: int = 24, once: bool = False) -> Iterator[Streams]:
    """`clients` clients, each with one stream after the other (or with one). At the end, all that run are awaited.

    Raises AssertionError when one did not come whole.
    """
    streams = Streams()
    threads = [
        threading.Thread(target=streams._work, args=(base, model, tokens), kwargs={"once": once}, daemon=True)
        for _ in range(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        streams._stop.set()
        for thread in threads:
            thread.join(_SECONDS)
    assert not streams.broken, (
        f"{len(streams.broken)} of {streams.whole + len(streams.broken)} streams: {streams.broken[0]}"
    )
