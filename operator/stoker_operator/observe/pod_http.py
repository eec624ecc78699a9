"""What pods say over HTTP: the progress of a prefetch, and one completion of a new revision.

Invariants: every request has a deadline and a bounded answer; no failure raises, it is an answer that says
why. The completion is the operator's own proof: /ready, which the kubelet asks, is 200 only after a warm-up
completion *inside* the pod; this one crosses the pod network and the API, the way a client's request does.
Knows nothing of Kubernetes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from stoker_operator.observe.snapshot import AdapterReport, Progress

_LARGEST_ANSWER = 1 << 20
_LARGEST_PAGE = 4 << 20
# A pod's certificate is for the name of its service, and made by whom the operator does not know: it reads no Secrets.
# What is asked holds no secret, and what is answered decides about that pod alone.
NOT_VERIFIED = False
# /ready is answered beside all other work.
BRIEF_SECONDS = 3.0


class Address(NamedTuple):
    """Where a pod answers, and how."""

    ip: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """The beginning of its URLs."""
        return f"{self.scheme}://{url_host(self.ip)}:{self.port}"


class PodClient:
    """Asks pods by their IP. `timeout` is in seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._brief = aiohttp.ClientTimeout(total=min(timeout, BRIEF_SECONDS))

    async def progress(self, address: Address) -> Progress | None:
        """What `stoker fetch` says of its progress; None when it does not answer yet or any more."""
        status, body = await self._ask("GET", f"{address.url}/progress", None)
        if status != 200:
            return None
        numbers = [body.get(key) for key in ("bytesDone", "bytesTotal", "etaSeconds")]
        done, total, eta = (int(n) if isinstance(n, int | float) else 0 for n in numbers)
        return Progress(str(body.get("phase", "")), done, total, eta)

    async def complete(self, address: Address, model: str) -> str:
        """Ask for one token, or for a score where the model gives none: "" when it came, else why not."""
        wanted = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        url = f"{address.url}/v1/completions"
        status, body = await self._ask("POST", url, wanted)
        answer = "choices"
        if status == 400 and _error_code(body) == "model_does_not_generate":
            # A model that embeds or scores answers this one, whichever it does.
            url, answer = f"{address.url}/v1/score", "data"
            status, body = await self._ask("POST", url, {"model": model, "text_1": "Hello", "text_2": "Hello"})
        if status == 0:
            return f"no answer from {url}: {body['error']}; does a NetworkPolicy keep the operator out?"
        if status in (401, 403):
            # The engine keeps its keys from us, or wants a certificate. It runs, speaks HTTP, and /ready vouches for
            # the completion.
            return ""
        if status == 429 and _error_code(body) == "rate_limit_exceeded":
            # Others have used the minute; it runs, too.
            return ""
        if status != 200:
            return f"{url} answered {status}: {json.dumps(body)[:300]}"
        found = body.get(answer)
        return "" if isinstance(found, list) and found else f"{url} answered without {answer}"

    async def words(self, addresses: Sequence[Address]) -> list[str | None]:
        """What the engines there say is wrong, each its own, "" = nothing; None of one that does not answer: an engine
        that hangs or is gone does not. Each is asked twice, for a lost packet.
        """
        if not addresses:
            return []
        # One session, which costs a third of a question. Nobody waits for the answers of others, and a second try is on
        # a connection of its own.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=self._brief, connector=connector) as session:
            return await asyncio.gather(*(_word(session, address) for address in addresses))

    async def adapters(self, address: Address) -> tuple[AdapterReport, ...] | None:
        """What the engine there says of the adapters of its list; None when it does not answer, or follows no list."""
        status, body = await self._ask("GET", f"{address.url}/ready", None, self._brief)
        found = body.get("adapters")
        if status != 200 or not isinstance(found, list):
            return None
        keys = ("name", "digest", "state", "reason", "message")
        return tuple(
            AdapterReport(*(str(each.get(key, "")) for key in keys)) for each in found if isinstance(each, dict)
        )

    async def page(self, address: Address, path: str) -> str:
        """A page of text, as /metrics is; "" when the pod does not give it."""
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.get(f"{address.url}{path}", ssl=NOT_VERIFIED) as answer,
            ):
                text = (await read_at_most(answer, _LARGEST_PAGE)).decode("utf-8", "replace")
                return text if answer.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""

    async def _ask(
        self, method: str, url: str, body: Mapping[str, Any] | None, timeout: aiohttp.ClientTimeout | None = None
    ) -> tuple[int, dict[str, Any]]:
        async with aiohttp.ClientSession(timeout=timeout or self._timeout) as session:
            return await _asked(session, method, url, body)


async def _word(session: aiohttp.ClientSession, address: Address) -> str | None:
    for _ in range(2):
        status, body = await _asked(session, "GET", f"{address.url}/ready", None)
        if status:
            warnings = body.get("warnings")
            return " ".join(map(str, warnings)) if isinstance(warnings, list) else ""
    return None


async def _asked(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
) -> tuple[int, dict[str, Any]]:
    """(status, JSON body); status 0 and why where nothing answered."""
    try:
        async with session.request(method, url, json=body, ssl=NOT_VERIFIED) as answer:
            raw = await read_at_most(answer, _LARGEST_ANSWER)
            status = answer.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return 0, {"error": f"{type(error).__name__} {error}".strip()}
    try:
        parsed = json.loads(raw)
    except ValueError:
        parsed = {"text": raw[:300].decode("utf-8", "replace")}
    return status, parsed if isinstance(parsed, dict) else {"value": parsed}


def _error_code(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("code", "")) if isinstance(error, dict) else ""


async def read_at_most(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, cut at `limit` bytes: a single `read` would stop at what has arrived so far."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) >= limit:
            break
    return bytes(body[:limit])


def pod_address(pod: Mapping[str, Any], port_name: str) -> Address | None:
    """Where a container's named port answers; None while the pod has no address. A pod says itself whether it speaks
    TLS: while a service takes it up, some of its pods do.
    """
    ip = str(pod.get("status", {}).get("podIP") or "")
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == port_name and ip:
                probe = (container.get("readinessProbe") or {}).get("httpGet") or {}
                return Address(ip, int(port["containerPort"]), str(probe.get("scheme") or "HTTP").lower())
    return None


def url_host(ip: str) -> str:
    """The IP as a URL spells it."""
    return f"[{ip}]" if ":" in ip else ip
