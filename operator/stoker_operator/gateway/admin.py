"""Asks Envoy's own interface how many requests it has, and tells it that its connections are to end.

Invariants: loopback only; an Envoy that does not answer has no requests.
Knows nothing of models.
"""

from __future__ import annotations

import json

import aiohttp

_SECONDS = 3.0
_ACTIVE = "http.gateway.downstream_rq_active"


class Admin:
    """At `port` of loopback."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    async def ready(self) -> bool:
        """Whether Envoy has read its configuration and takes requests."""
        answer = await self._ask("GET", "/ready")
        return answer is not None and answer.strip() == "LIVE"

    async def active(self) -> int:
        """Requests that have no end yet."""
        answer = await self._ask("GET", f"/stats?format=json&filter=^{_ACTIVE}$")
        try:
            return int(json.loads(answer or "")["stats"][0]["value"])
        except (ValueError, LookupError, TypeError):
            return 0

    async def drain(self) -> None:
        """No new connections; those that are there end with their request."""
        await self._ask("POST", "/drain_listeners?graceful")

    async def _ask(self, method: str, path: str) -> str | None:
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, f"{self._url}{path}") as answer,
            ):
                return await answer.text() if answer.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
