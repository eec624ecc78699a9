"""The gauges of engine pods, read from the pods themselves.

Invariants: only ready pods are read: one that loads has no queue to speak of, and an autoscaler must see that it has
no sample, not that it is idle; a pod that does not answer in time has no sample either; a pod is read at most once
in a few seconds, however many series are asked for.
Knows nothing of who asks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp

from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.kinds import POD
from stoker_operator.manifests.identity import COMPONENT, MANAGED_BY
from stoker_operator.observe.gauges import Gauges, parse
from stoker_operator.observe.pod_http import NOT_VERIFIED, pod_address, read_at_most
from stoker_operator.observe.rollout import is_ready, is_terminating

log = logging.getLogger("stoker.operator")
FRESH_SECONDS = 5.0
_LARGEST_PAGE = 4 << 20
_SCRAPES_AT_ONCE = 64


class Scraper:
    """Samples of the pods of one cluster. `timeout` is in seconds, per pod."""

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self._cluster = cluster
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._slots = asyncio.Semaphore(_SCRAPES_AT_ONCE)
        self._pages: dict[str, tuple[float, str, Gauges]] = {}

    async def samples(self, namespace: str, selector: str, pod: str, series: str) -> list[tuple[str, float, str]]:
        """(pod, value, time) of every ready pod that `selector` and `pod` ("*": any) name. Raises ApiError."""
        ours = f"{MANAGED_BY}=stoker,{COMPONENT}=engine"
        pods = await self._cluster.list_all(POD, namespace, f"{ours},{selector}" if selector else ours)
        named = [item for item in pods if pod in ("*", item["metadata"]["name"])]
        ready = [item for item in named if is_ready(item) and not is_terminating(item)]
        self._forget_old()
        async with aiohttp.ClientSession(timeout=self._timeout) as session:
            pages = await asyncio.gather(*(self._page(session, item) for item in ready))
        return [
            (item["metadata"]["name"], gauges[series], when)
            for item, (when, gauges) in zip(ready, pages, strict=True)
            if series in gauges
        ]

    async def _page(self, session: aiohttp.ClientSession, pod: Mapping[str, Any]) -> tuple[str, Gauges]:
        """(time, gauges) of one pod; no gauges when it does not answer."""
        uid, address = str(pod["metadata"]["uid"]), pod_address(pod, "http")
        read, when, gauges = self._pages.get(uid, (0.0, "", {}))
        if gauges and time.monotonic() - read < FRESH_SECONDS:
            return when, gauges
        if address is None:
            return "", {}
        url = f"{address.url}/metrics"
        try:
            async with self._slots, session.get(url, ssl=NOT_VERIFIED) as answer:
                text = (await read_at_most(answer, _LARGEST_PAGE)).decode("utf-8", "replace")
                gauges = parse(text) if answer.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.warning("pod %s: no metrics from %s: %s", pod["metadata"]["name"], url, error or type(error).__name__)
            return "", {}
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._pages[uid] = (time.monotonic(), when, gauges)
        return when, gauges

    def _forget_old(self) -> None:
        now = time.monotonic()
        self._pages = {uid: page for uid, page in self._pages.items() if now - page[0] < FRESH_SECONDS}
