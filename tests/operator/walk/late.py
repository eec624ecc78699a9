"""A mirror whose watches tell late, each kind's by its own time, which changes: as on a machine that does much else.

Invariants: a watch's news stay in their order, and all are told.
Knows nothing of what the objects mean.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

from stoker_operator.cluster.api import Object
from stoker_operator.cluster.kinds import Kind
from stoker_operator.observe.mirror import Mirror

News = tuple[float, tuple[str, Object] | Exception | None]
# A watch is late for so long at a time, or on time, which it is more often.
SPELL_SECONDS = (1.0, 5.0)
LATE_SHARE = 0.3


class LateMirror(Mirror):
    """Its watches are `longest` seconds late at most."""

    def __init__(self, *arguments: Any, longest: float) -> None:
        super().__init__(*arguments)
        self._longest = longest
        self._random = random.Random(longest)

    async def watch(self, kind: Kind, namespace: str, selector: str, since: str) -> AsyncIterator[tuple[str, Object]]:
        """As Cluster's, later."""
        told: asyncio.Queue[News] = asyncio.Queue()
        reading = asyncio.create_task(self._read(told, super().watch(kind, namespace, selector, since)))
        ends, late = 0.0, 0.0
        try:
            while True:
                at, news = await told.get()
                if (now := time.monotonic()) > ends:
                    late = self._random.uniform(0, self._longest) if self._random.random() < LATE_SHARE else 0.0
                    ends = now + self._random.uniform(*SPELL_SECONDS)
                await asyncio.sleep(max(0.0, at + late - now))
                if news is None:
                    return
                if isinstance(news, Exception):
                    raise news
                yield news
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, told: asyncio.Queue[News], watch: AsyncIterator[tuple[str, Object]]) -> None:
        end: Exception | None = None
        try:
            async for news in watch:
                told.put_nowait((time.monotonic(), news))
        except Exception as error:
            end = error
        told.put_nowait((time.monotonic(), end))
