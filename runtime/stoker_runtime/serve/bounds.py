"""uvicorn's HTTP protocol with bounds on what anybody may send before a key is asked for.

Invariants: no more than HEADER_BYTES of headers (and one read) are ever held; a connection whose headers do not come,
or whose body does not end after it was answered, is closed. Who is refused can read why: what still comes is dropped
for a moment before the connection ends.
Knows nothing of routes. How long a body may take is `api/http/reading.py`'s to say. Statuses: RFC 9110, RFC 6585.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.errors import error_body
from stoker_runtime.errors import RequestError

HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 30.0
LINGER_SECONDS = 5.0


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    header_bytes = HEADER_BYTES
    header_seconds = HEADER_SECONDS
    linger_seconds = LINGER_SECONDS
    over: Callable[[], None] | None = None
    """Called when the connection is over."""

    _heading = True
    _refused = False
    _size = 0
    _raw = 0
    _certificate: Sequence[str] = ()
    _deadline: asyncio.TimerHandle | None = None
    _linger: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody connects, and has so long to ask."""
        super().connection_made(transport)
        over_tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        shown = over_tls.getpeercert(binary_form=True) if over_tls is not None else None
        self._certificate = [ssl.DER_cert_to_PEM_cert(shown)] if shown else []
        self._await_headers()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._heading, self._size, self._raw = True, 0, 0
        if self._certificate:
            # ASGI's extension for TLS.
            self.scope["extensions"] = {"tls": {"client_cert_chain": self._certificate}}

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._cancel_timers()
        super().connection_lost(exc)
        if self.over is not None:
            self.over()

    def data_received(self, data: bytes) -> None:
        """Read on; the parser tells of a header only when it is whole, so its bytes are counted here."""
        if self._refused:
            return
        super().data_received(data)
        if self._heading and not self._refused:
            self._raw += len(data)
            if self._raw > self.header_bytes:
                self._refuse_headers()
            elif self._deadline is None:
                self._await_headers()

    def send_400_response(self, msg: str) -> None:
        """Say that this is no HTTP, unless something else was said."""
        if not self._refused:
            super().send_400_response(msg)

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        self._size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or behind a chunked body a trailer."""
        self._size += len(name) + len(value)
        if self._size <= self.header_bytes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request may be answered from here on."""
        if self._size > self.header_bytes:
            self._refuse_headers()
        if not self._refused:
            self._heading = False
            self._stop_waiting()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if not self._refused:
            super().on_message_complete()
            if self._linger is not None:
                self._linger.cancel()
                self._linger = None

    def on_response_complete(self) -> None:
        """An answer went out; whose body still comes has a moment to end it."""
        super().on_response_complete()
        if not self._heading and self.cycle.more_body and self._linger is None:
            self._linger = self.loop.call_later(self.linger_seconds, self.transport.close)

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(self.header_seconds, self._headers_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _headers_late(self) -> None:
        self._deadline = None
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is under way; what comes behind it may wait for its end.
            self._await_headers()
        elif self._heading and not self._refused:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"No whole request came within {self.header_seconds:g} seconds.")

    def _refuse_headers(self) -> None:
        reason = f"The headers have more than {self.header_bytes} bytes, which is the most allowed."
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Answer, take nothing more, and end the connection."""
        self._refused = True
        self._stop_waiting()
        body = JsonAnswer(error_body(RequestError(reason))).body
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + bytes(body))
        # Closed at once, what the client still sends would make its side drop the answer.
        self.flow.resume_reading()
        self._linger = self.loop.call_later(self.linger_seconds, self.transport.close)

    def _cancel_timers(self) -> None:
        self._stop_waiting()
        if self._linger is not None:
            self._linger.cancel()
