"""The requests of one service that wait for a pod, in the order in which they came.

Invariants: so many wait at most; nobody overtakes: pods get requests in the order of arrival, one written after the
other; whoever waits learns what became of it: a pod, or that there will be none.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from stoker_operator import metrics
from stoker_operator.activator.directory import Pod, Sleeper


class Turned(Exception):
    """A request that is not held, or not any longer; the message is for its client."""

    result = ""


class Full(Turned):
    """As many wait as may."""

    result = "full"


class Expired(Turned):
    """It waited for as long as it may."""

    result = "expired"


class Gone(Turned):
    """The service is not there any more, or nobody holds requests for it."""

    result = "gone"


class Line:
    """One service's. `call` is told that somebody waits: by the sleep's name, and what it waits with."""

    def __init__(self, sleeper: Sleeper, call: Callable[[Sleeper, str], None]) -> None:
        self.sleeper = sleeper
        self._call = call
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._gate = asyncio.Lock()
        self._turn = itertools.count()
        self._first = ""
        self._gauge = metrics.ACTIVATOR_HELD.labels(*sleeper.key)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def update(self, sleeper: Sleeper | None) -> None:
        """The service is another by now; None, it is none of ours."""
        if sleeper is None:
            self._let_go("The service is not there any more, or it never sleeps from now on.")
            return
        self.sleeper = sleeper
        if sleeper.pods:
            self._let_go("")
        elif self._waiting:
            self._call(sleeper, self._first)

    async def pod(self, what: str, deadline: float) -> Pod:
        """A pod to ask, once there is one; `what` is the request in words, `deadline` by the monotonic clock.

        Raises Full at once, Expired, Gone.
        """
        if not self.sleeper.pods:
            await self._wait(what, deadline)
        pods = self.sleeper.pods
        if not pods:
            raise Expired("The pod that was ready is not any more.")
        return pods[next(self._turn) % len(pods)]

    def check_room(self) -> None:
        """Raises Full where a request that came now would not be held."""
        bounds = self.sleeper.bounds
        if not self.sleeper.pods and len(self._waiting) >= bounds.max_queued:
            raise Full(f"The service's pods start, and {len(self._waiting)} requests wait for them already.")

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """While it lasts, nobody behind sends a request."""
        async with self._gate:
            yield

    async def _wait(self, what: str, deadline: float) -> None:
        self.check_room()
        if not self._waiting:
            self._first = what
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._standing(place):
            self._call(self.sleeper, self._first)
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await place
            except TimeoutError:
                raise Expired("The service's pods did not become ready in time.") from None

    @contextmanager
    def _standing(self, place: asyncio.Future[None]) -> Iterator[None]:
        self._waiting.append(place)
        self._gauge.set(len(self._waiting))
        try:
            yield
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
            self._gauge.set(len(self._waiting))

    def _let_go(self, gone: str) -> None:
        """All that wait go on, the first one first: to a pod, or with the reason why there will be none."""
        while self._waiting:
            place = self._waiting.popleft()
            if place.done():
                continue
            if gone:
                place.set_exception(Gone(gone))
            else:
                place.set_result(None)
        self._gauge.set(0)
