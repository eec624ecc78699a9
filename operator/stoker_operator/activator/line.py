"""The requests of one service that wait for a pod, in the order in which they came.

Invariants: so many wait at most; nobody overtakes: pods get requests in the order of arrival, one written after the
other; whoever waits learns what became of it: a pod, or that there will be none.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """One service's. `call` is told that somebody waits: by the sleep's name, and what it waits with.

    A request's place is a number, given in the order of arrival. Whoever has the lowest of those that are not sent yet
    is next; he keeps it until he is sent or gone, also while a pod that was ready could not be reached.
    """

    def __init__(self, sleeper: Sleeper, call: Callable[[Sleeper, str], None]) -> None:
        self.sleeper = sleeper
        self._call = call
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._places = itertools.count()
        self._unsent: list[int] = []
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._round = itertools.count()
        self._first = ""
        self._gauge = metrics.ACTIVATOR_HELD.labels(*sleeper.key)

    def __len__(self) -> int:
        """How many wait for a pod."""
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

    @contextmanager
    def place(self) -> Iterator[int]:
        """A place behind all who came before, until the request has ended."""
        place = next(self._places)
        self._unsent.append(place)
        try:
            yield place
        finally:
            self.sent(place)

    async def pod(self, place: int, what: str, deadline: float) -> Pod:
        """A pod to ask, once there is one and all in front are sent or gone; nobody behind is sent before `sent` is
        called. `what` is the request in words, `deadline` by the monotonic clock.

        Raises Full at once, Expired, Gone.
        """
        if place not in self._unsent:
            bisect.insort(self._unsent, place)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                while not self.sleeper.pods or self._unsent[0] != place:
                    await (self._turn(place) if self.sleeper.pods else self._wait(what))
        except TimeoutError:
            raise Expired("The service's pods did not become ready in time.") from None
        return self.sleeper.pods[next(self._round) % len(self.sleeper.pods)]

    def sent(self, place: int) -> None:
        """The request of this place is written, so the next one may be."""
        if place in self._unsent:
            self._unsent.remove(place)
        turn = self._turns.get(self._unsent[0]) if self._unsent else None
        if turn is not None and not turn.done():
            turn.set_result(None)

    def check_room(self) -> None:
        """Raises Full where a request that came now would not be held."""
        bounds = self.sleeper.bounds
        if not self.sleeper.pods and len(self._waiting) >= bounds.max_queued:
            raise Full(f"The service's pods start, and {len(self._waiting)} requests wait for them already.")

    async def _turn(self, place: int) -> None:
        """Until nobody in front is left to be sent."""
        self._turns[place] = asyncio.get_running_loop().create_future()
        try:
            await self._turns[place]
        finally:
            del self._turns[place]

    async def _wait(self, what: str) -> None:
        """Until there is a pod."""
        self.check_room()
        if not self._waiting:
            self._first = what
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._standing(waiting):
            self._call(self.sleeper, self._first)
            await waiting

    @contextmanager
    def _standing(self, waiting: asyncio.Future[None]) -> Iterator[None]:
        self._waiting.append(waiting)
        self._gauge.set(len(self._waiting))
        try:
            yield
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            self._gauge.set(len(self._waiting))

    def _let_go(self, gone: str) -> None:
        """All that wait go on: to a pod in their turn, or with the reason why there will be none."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if waiting.done():
                continue
            if gone:
                waiting.set_exception(Gone(gone))
            else:
                waiting.set_result(None)
        self._gauge.set(0)
