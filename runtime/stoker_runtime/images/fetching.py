"""The bytes of an image from a host that the operator of the server allows.

Invariants: no request goes to a host that is not allowed, redirects included, and no file of this machine is read;
bytes and seconds are bounded; no message holds a URL, which may carry a secret, but at most its host.
Knows nothing of what the bytes are.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from stoker_runtime.images import source as sources
from stoker_runtime.images.source import ImageSource

MAX_TOTAL_BYTES = 256 * 1024 * 1024
"""Of all files that one request has fetched."""
SECONDS = 10.0
"""For one file, redirects included."""
MAX_REDIRECTS = 5
AT_A_TIME = 8
FLAG = "--allowed-media-domains"


@dataclass(slots=True)
class Budget:
    """Bytes that one request may still fetch."""

    left: int = MAX_TOTAL_BYTES


class Fetcher:
    """Gets files over HTTP, from the hosts of `domains` alone."""

    def __init__(self, domains: tuple[str, ...]) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._client: httpx.AsyncClient | None = None
        self._seats = asyncio.Semaphore(AT_A_TIME)
        self._opening = asyncio.Lock()

    async def fetch(self, source: ImageSource, budget: Budget) -> bytes:
        """The file that a URL names. Raises RequestError."""
        url = self._allowed(source, source.url)
        async with self._seats:
            try:
                async with asyncio.timeout(SECONDS):
                    return await self._follow(source, url, budget)
            except TimeoutError:
                raise source.refused(f"{url.host} did not send it within {SECONDS:g} s", said=False) from None
            except httpx.HTTPError as error:
                kind = type(error).__name__
                raise source.refused(f"{url.host} cannot be asked for it: {kind}", said=False) from None

    async def _opened(self) -> httpx.AsyncClient:
        """The client of all requests, made when it is wanted: it loads the certificates of the system."""
        async with self._opening:
            if self._client is None:
                # It would log whole URLs, and what a host sets for one caller it would send for another.
                logging.getLogger("httpx").setLevel(logging.WARNING)
                jar = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
                self._client = await asyncio.to_thread(httpx.AsyncClient, cookies=jar, timeout=SECONDS)
        return self._client

    def _allowed(self, source: ImageSource, url: str | httpx.URL) -> httpx.URL:
        """`url`, whose host may be asked. What is checked here is what is asked: no second parser reads it."""
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, UnicodeError, ValueError):
            raise source.refused("is not a valid URL") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise source.refused("must be a data: URL, or one of http or https")
        if not self._domains:
            raise source.refused(
                f"is on {parsed.host}; this server fetches no images, because it runs without {FLAG}. Send it as a "
                "data: URL",
            )
        if parsed.host.lower() not in self._domains:
            raise source.refused(f"is on {parsed.host}, which is none of the hosts that {FLAG} names")
        return parsed

    async def _follow(self, source: ImageSource, url: httpx.URL, budget: Budget) -> bytes:
        client = await self._opened()
        for _ in range(MAX_REDIRECTS + 1):
            # Not compressed: a few bytes could become more than memory holds.
            async with client.stream("GET", url, headers={"accept-encoding": "identity"}) as answer:
                if not answer.has_redirect_location:
                    return await _body(source, url, answer, budget)
                location = answer.headers["location"]
            try:
                url = self._allowed(source, url.join(location))
            except httpx.InvalidURL:
                raise source.refused(f"{url.host} redirects to what is no URL", said=False) from None
        raise source.refused(f"{url.host} redirects more than {MAX_REDIRECTS} times", said=False)


async def _body(source: ImageSource, url: httpx.URL, answer: httpx.Response, budget: Budget) -> bytes:
    if answer.status_code != 200:
        raise source.refused(f"{url.host} answers {answer.status_code}", said=False)
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise source.refused(f"{url.host} sends it compressed, which was not asked for", said=False)
    found = bytearray()
    async for chunk in answer.aiter_raw():
        found += chunk
        budget.left -= len(chunk)
        if len(found) > sources.MAX_BYTES:
            raise source.too_large()
        if budget.left < 0:
            raise source.refused(f"is one too many: one request fetches at most {MAX_TOTAL_BYTES >> 20} MiB")
    return bytes(found)
