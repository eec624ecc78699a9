"""An https:// source: one file of a web server, or all parts of a split GGUF model.

Invariants: a token goes to the origin it was given for and to no other (httpx drops it when a redirect leaves the
origin); no message holds a query string, since signed addresses carry credentials there; nothing but a file's bytes is
read further than `MAX_ANSWER_BYTES`, and headers end at what h11 takes (100 KiB).
Knows nothing of repositories.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import quote, unquote

import httpx

from stoker_runtime.checkpoint.gguf_split import part_names
from stoker_runtime.fetch.errors import FetchFailed, HubUnreachable, ModelNotFound, TokenRejected
from stoker_runtime.fetch.reference import Reference
from stoker_runtime.fetch.source import Body, Bounded, Listing, SourceFile, Transient

# A server that sends nothing for this long is treated as gone; the download goes on in a new connection.
STALL_SECONDS = 60.0
CONNECT_SECONDS = 10.0
# Of an answer that is no file: an error's text, a redirect's.
MAX_ANSWER_BYTES = 1 << 20


def product() -> tuple[str, str]:
    """Name and version for a user agent."""
    try:
        return "stoker", version("stoker")
    except PackageNotFoundError:
        return "stoker", "0"


def reason_of(error: BaseException) -> str:
    """An error's own words, without the number in front and the full stop behind."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)).rstrip(".") or type(error).__name__


def shown(url: str) -> str:
    """The address without its query string."""
    return unquote(url.partition("?")[0])


def start_of(headers: Mapping[str, str], where: str) -> int:
    """The first byte that a 206 holds. Raises FetchFailed when it does not say."""
    match = re.match(r"bytes (\d+)-", headers.get("content-range", ""))
    if match is None:
        raise FetchFailed(f"{where} answered 206 without a usable Content-Range.")
    return int(match[1])


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait, at most five minutes; 0 when it does not."""
    value = headers.get("retry-after", "")
    return min(float(value), 300.0) if value.isascii() and value.isdigit() else 0.0


class _Stream(Bounded, httpx.SyncByteStream):
    """A bounded answer of httpx."""


class Web:
    """An HTTP client for one source. `token` is sent as a bearer token when it is not empty, and so is `cookie`."""

    def __init__(
        self,
        token: str = "",
        *,
        stall_seconds: float = STALL_SECONDS,
        connections: int = 16,
        auth: httpx.Auth | None = None,
        accept: str = "*/*",
        cookie: str = "",
    ) -> None:
        headers = {"user-agent": "/".join(product()), "accept-encoding": "identity", "accept": accept}
        if token:
            headers["authorization"] = f"Bearer {token}"
        if cookie:
            headers["cookie"] = cookie
        self._client = httpx.Client(
            headers=headers,
            auth=auth,
            follow_redirects=True,
            timeout=httpx.Timeout(stall_seconds, connect=min(CONNECT_SECONDS, stall_seconds), pool=None),
            limits=httpx.Limits(max_connections=connections),
            event_hooks={"response": [self._bound]},
        )
        self._has_token = bool(token)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def head(self, url: str) -> httpx.Response:
        """HEAD, or the head of a GET where HEAD is refused."""
        with self._mapped(url):
            response = self._client.head(url)
            if response.status_code in (403, 405, 501):
                with self._client.stream("GET", url) as response:
                    self._check(response)
                    return response
            self._check(response)
            return response

    @contextmanager
    def stream(self, url: str, offset: int, version_pin: str = "") -> Iterator[Body]:
        """GET from `offset` on. `version_pin`, an ETag, makes a changed file start again at 0."""
        headers = {"range": f"bytes={offset}-"} if offset else {}
        if offset and version_pin.startswith('"'):
            headers["if-range"] = version_pin
        with self._mapped(url), self._client.stream("GET", url, headers=headers) as response:
            self._check(response)
            start = start_of(response.headers, shown(url)) if response.status_code == 206 else 0
            if start not in (0, offset):
                raise FetchFailed(f"{shown(url)} was asked for byte {offset} and answered from byte {start}.")
            yield Body(start, self._read(response, url))

    def _read(self, response: httpx.Response, url: str) -> Iterator[bytes]:
        with self._mapped(url):
            yield from response.iter_raw()

    def _bound(self, response: httpx.Response) -> None:
        """Before an answer is read: only a file may be long."""
        if response.status_code not in (200, 206) and isinstance(response.stream, httpx.SyncByteStream):
            response.stream = _Stream(response.stream, MAX_ANSWER_BYTES, shown(str(response.url)))

    def _check(self, response: httpx.Response) -> None:
        """Raise for a status that is no success."""
        status, where = response.status_code, shown(str(response.url))
        if status < 400:
            return
        if status == 401:
            text = "rejected the token" if self._has_token else "needs a token, and none was given"
            raise TokenRejected(f"{where} {text} (401).")
        if status == 403:
            text = "The token has no access to it" if self._has_token else "It needs a token, and none was given"
            raise TokenRejected(f"{where} refused access (403). {text}.")
        if status == 404:
            raise ModelNotFound(f"{where} does not exist (404).")
        if status in (408, 425, 429) or status >= 500:
            raise Transient(FetchFailed(f"{where} answered with status {status}."), retry_after(response.headers))
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
            raise Transient(HubUnreachable(f"{shown(url)} cannot be reached: {reason_of(error)}.")) from None
        except (httpx.InvalidURL, httpx.TooManyRedirects) as error:
            raise FetchFailed(f"{shown(url)}: {error}") from None


class WebFile:
    """An https:// source: one file, with its other parts when it is one of a split GGUF model."""

    local = False

    def __init__(self, reference: Reference, web: Web) -> None:
        self._url = reference.place
        self._name = reference.file
        self._web = web

    def listing(self, revision: str) -> Listing:
        """The file, or the parts; the first one's ETag or modification date stands for the commit."""
        del revision
        files = tuple(self._file(name) for name in part_names(self._name) or (self._name,))
        return Listing(files[0].version.removeprefix("W/").strip('"'), files)

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Stream the file from `offset`."""
        with self._web.stream(file.place, offset, file.version) as body:
            yield body

    def _file(self, name: str) -> SourceFile:
        url = self._url if name == self._name else self._sibling(name)
        headers = self._web.head(url).headers
        length = headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdigit() else -1
        return SourceFile(name, size, url, version=headers.get("etag", "") or headers.get("last-modified", ""))

    def _sibling(self, name: str) -> str:
        """The address of another part: the same with another name."""
        path, mark, query = self._url.partition("?")
        return f"{path.rpartition('/')[0]}/{quote(name)}{mark}{query}"
