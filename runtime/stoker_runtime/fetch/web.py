"""HTTP for the sources: one client, byte ranges, and every failure mapped to a FetchError or a Transient.

Invariants: a token goes to the origin it was given for and to no other (httpx drops it when a redirect
leaves the origin); no message holds a query string, since signed addresses carry credentials there.
Knows nothing of repositories; `hub.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import unquote

import httpx

from stoker_runtime.fetch.errors import FetchFailed, HubUnreachable, ModelNotFound, TokenRejected
from stoker_runtime.fetch.reference import Reference
from stoker_runtime.fetch.source import Body, Listing, SourceFile, Transient

# A server that sends nothing for this long is treated as gone; the download goes on in a new connection.
STALL_SECONDS = 60.0


def _user_agent() -> str:
    try:
        return f"stoker/{version('stoker')}"
    except PackageNotFoundError:
        return "stoker"


def _reason(error: Exception) -> str:
    """An error's own words, without the number in front and the full stop behind."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)).rstrip(".") or type(error).__name__


def shown(url: str) -> str:
    """The address without its query string."""
    return unquote(url.partition("?")[0])


class Web:
    """An HTTP client for one source. `token` is sent as a bearer token when it is not empty."""

    def __init__(self, token: str = "", *, stall_seconds: float = STALL_SECONDS, connections: int = 16) -> None:
        headers = {"user-agent": _user_agent(), "accept-encoding": "identity"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        self._client = httpx.Client(
            headers=headers,
            follow_redirects=True,
            timeout=httpx.Timeout(stall_seconds, connect=min(10.0, stall_seconds), pool=None),
            limits=httpx.Limits(max_connections=connections),
        )
        self.has_token = bool(token)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def json(self, url: str) -> tuple[Any, str]:
        """GET a JSON document; also returns the address of the next page, or ""."""
        with self._mapped(url):
            response = self._client.get(url)
            self.check(response)
            try:
                document = response.json()
            except ValueError:
                raise FetchFailed(
                    f"{shown(url)} answered with something that is no JSON; is this address a hub?"
                ) from None
            return document, response.links.get("next", {}).get("url", "")

    def head(self, url: str) -> httpx.Response:
        """HEAD, or the head of a GET where HEAD is refused."""
        with self._mapped(url):
            response = self._client.head(url)
            if response.status_code in (403, 405, 501):
                with self._client.stream("GET", url) as response:
                    self.check(response)
                    return response
            self.check(response)
            return response

    @contextmanager
    def stream(self, url: str, offset: int, version_pin: str = "") -> Iterator[Body]:
        """GET from `offset` on. `version_pin`, an ETag, makes a changed file start again at 0."""
        headers = {"range": f"bytes={offset}-"} if offset else {}
        if offset and version_pin.startswith('"'):
            headers["if-range"] = version_pin
        with self._mapped(url), self._client.stream("GET", url, headers=headers) as response:
            self.check(response)
            start = _start_of(response) if response.status_code == 206 else 0
            if start not in (0, offset):
                raise FetchFailed(f"{shown(url)} was asked for byte {offset} and answered from byte {start}.")
            yield Body(start, self._read(response, url))

    def _read(self, response: httpx.Response, url: str) -> Iterator[bytes]:
        with self._mapped(url):
            yield from response.iter_raw()

    def check(self, response: httpx.Response) -> None:
        """Raise for a status that is no success; the caller of `check` may know better reasons and look
        first.
        """
        status, where = response.status_code, shown(str(response.url))
        if status < 400:
            return
        if status == 401:
            text = "rejected the token" if self.has_token else "needs a token, and none was given"
            raise TokenRejected(f"{where} {text} (401).")
        if status == 403:
            text = "The token has no access to it" if self.has_token else "It needs a token, and none was given"
            raise TokenRejected(f"{where} refused access (403). {text}; if the model is gated, accept its terms there.")
        if status == 404:
            raise ModelNotFound(f"{where} does not exist (404).")
        if status in (408, 425, 429) or status >= 500:
            raise Transient(FetchFailed(f"{where} answered with status {status}."), _retry_after(response))
        raise FetchFailed(f"{where} answered with status {status}.")

    @contextmanager
    def _mapped(self, url: str) -> Iterator[None]:
        """Turn httpx's errors into ours."""
        try:
            yield
        except httpx.TimeoutException as error:
            what = "no connection" if isinstance(error, httpx.ConnectTimeout) else "no bytes"
            raise Transient(HubUnreachable(f"{shown(url)}: {what} in time.")) from None
        except (httpx.TransportError, httpx.StreamError) as error:
            raise Transient(HubUnreachable(f"{shown(url)} cannot be reached: {_reason(error)}.")) from None
        except (httpx.InvalidURL, httpx.TooManyRedirects) as error:
            raise FetchFailed(f"{shown(url)}: {error}") from None


class WebFile:
    """An https:// source: one file."""

    local = False

    def __init__(self, reference: Reference, web: Web, sha256: str = "") -> None:
        self._url = reference.place
        self._name = unquote(shown(self._url).rsplit("/", 1)[1])
        self._web = web
        self._sha256 = sha256

    def listing(self, revision: str) -> Listing:
        """One file; its ETag or modification date stands for the commit."""
        del revision
        response = self._web.head(self._url)
        pin = response.headers.get("etag", "") or response.headers.get("last-modified", "")
        size = int(response.headers.get("content-length", -1))
        file = SourceFile(self._name, size, self._url, sha256=self._sha256, version=pin)
        return Listing(pin.removeprefix("W/").strip('"'), (file,))

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Stream the file from `offset`."""
        with self._web.stream(file.place, offset, file.version) as body:
            yield body


def _start_of(response: httpx.Response) -> int:
    match = re.match(r"bytes (\d+)-", response.headers.get("content-range", ""))
    if match is None:
        raise FetchFailed(f"{shown(str(response.url))} answered 206 without a usable Content-Range.")
    return int(match[1])


def _retry_after(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "")
    return min(float(value), 300.0) if value.isdigit() else 0.0
