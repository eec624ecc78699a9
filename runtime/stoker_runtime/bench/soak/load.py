"""The load: clients that send one request after the other, more of them and fewer, until time or requests are over.

Each tenth of the time climbs the same ladder of streams (1, 4, 16, … up to the most), so that tenths can be compared.
The clients of a rung begin one after the other over its first half: all at once, thousands of them would keep this
program from reading for a second, which is then in every gap.
Invariants: a client has one request under way at most; each ends with a count in the tally, and within the patience;
after the end no connection of the load is open.
Knows nothing of what requests are, nor of verdicts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stoker_runtime.bench.soak.held import device_mib, resident_mib
from stoker_runtime.bench.soak.kinds import KINDS, Kind
from stoker_runtime.bench.soak.tally import TENTHS, Sample, Tally
from stoker_runtime.bench.soak.visit import Facts, Failed, Full, Visit, Wrong
from stoker_runtime.bench.soak.wire import GONE, Wire
from stoker_runtime.errors import ConfigError

SPARE_DESCRIPTORS = 64
TICK_SECONDS = 0.05
SAMPLE_SECONDS = 1.0
FULL_SECONDS = 0.2
RISING = 0.5
"""The part of a rung in which its clients begin."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. `requests`: at most so many, 0 for as many as there is time; `patience`: seconds of one."""

    url: str
    api_key: str
    streams: int
    seconds: float
    requests: int
    patience: float
    seed: int
    ladder: bool = True
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)


def ladder(most: int) -> list[int]:
    """Numbers of streams, each four times the one before, up to `most`.

    >>> ladder(70)
    [1, 4, 16, 64, 70]
    """
    steps = [1]
    while steps[-1] * 4 <= most:
        steps.append(steps[-1] * 4)
    return steps if steps[-1] == most else [*steps, most]


def level_at(steps: list[int], tenth: float) -> int:
    """Clients that send at `tenth`, the part of a tenth that is over.

    >>> [level_at([1, 4, 16], tenth) for tenth in (0, 0.2, 0.42, 0.6, 0.75, 0.9, 1)]
    [1, 1, 2, 4, 10, 16, 16]
    """
    at = min(len(steps) - 1, int(tenth * len(steps)))
    risen = min(1.0, (tenth * len(steps) - at) / RISING)
    below = steps[max(at - 1, 0)]
    return below + int((steps[at] - below) * risen)


def allow_sockets(streams: int) -> None:
    """Make room for a socket a stream. Raises ConfigError where the system does not allow so many."""
    wanted = streams + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        if hard < wanted:
            raise ConfigError(
                f"--streams {streams} needs {wanted} open files, and the limit is {hard}; raise it with ulimit -n",
                param="streams",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Load:
    """The running load. `under_way` has the start of each request that has not ended."""

    def __init__(self, plan: Plan, facts: Facts, tally: Tally) -> None:
        self.plan, self.facts, self.tally = plan, facts, tally
        self.under_way: dict[object, float] = {}
        self.stopped = False
        self._began = time.monotonic()
        self._level = 1
        self._begun = 0
        self._steps = ladder(plan.streams) if plan.ladder else [plan.streams]

    @property
    def over(self) -> bool:
        """Whether no request is to be begun any more."""
        spent = bool(self.plan.requests) and self._begun >= self.plan.requests
        return self.stopped or spent or time.monotonic() - self._began >= self.plan.seconds

    @property
    def share(self) -> float:
        """The part of the load that is over, from 0 to 1: of its time, or of its requests where those end first."""
        passed = (time.monotonic() - self._began) / self.plan.seconds
        sent = self._begun / self.plan.requests if self.plan.requests else 0.0
        return min(1.0, max(passed, sent))

    async def run(self, memory_of: Callable[[], int | None]) -> None:
        """Send until it is over, and wait for what is under way. `memory_of`: the process whose memory to sample."""
        self._began = time.monotonic()
        watching = asyncio.create_task(self._watch(memory_of))
        async with asyncio.TaskGroup() as group:
            for at in range(self.plan.streams):
                group.create_task(self._client(at))
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    async def _watch(self, memory_of: Callable[[], int | None]) -> None:
        sampled, due = 0.0, time.monotonic()
        while True:
            self._level = level_at(self._steps, self.share * TENTHS % 1.0)
            moment = time.monotonic()
            self.tally.late[self._tenth].add(moment - due)
            now = moment - self._began
            if now - sampled >= SAMPLE_SECONDS and (pid := memory_of()) is not None:
                sampled = now
                device = await asyncio.to_thread(device_mib)
                self.tally.samples.append(Sample(self.share, resident_mib(pid), device))
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)

    async def _client(self, at: int) -> None:
        draw = random.Random(self.plan.seed * 1_000_003 + at)
        wire = Wire(self.plan.url, self.plan.api_key)
        names, weights = list(self.plan.kinds), [kind.weight for kind in self.plan.kinds.values()]
        try:
            while not self.over:
                if at >= self._level:
                    wire.leave()
                    await asyncio.sleep(TICK_SECONDS)
                    continue
                self._begun += 1
                (name,) = draw.choices(names, weights)
                await self.one(name, Visit(wire, draw, self.facts, self.tally, self._gap))
        finally:
            wire.leave()

    async def one(self, name: str, visit: Visit) -> None:
        """One request, counted by how it ended."""
        mark = object()
        self.under_way[mark] = time.monotonic()
        self.tally.most_streams = max(self.tally.most_streams, len(self.under_way))
        try:
            async with asyncio.timeout(self.plan.patience):
                await self.plan.kinds[name].run(visit)
            self.tally.ended(name, "ok")
        except Full:
            self.tally.ended(name, "full")
            await asyncio.sleep(FULL_SECONDS)
        except Failed as error:
            visit.wire.leave()  # the end of a stream that ended by an error has not been read
            self.tally.ended(name, "failed", str(error))
            await asyncio.sleep(FULL_SECONDS)
        except Wrong as error:
            visit.wire.leave()
            self.tally.ended(name, "wrong", str(error))
        except TimeoutError:
            visit.wire.leave()
            self.tally.ended(name, "unended", f"no end after {self.plan.patience:.0f} s")
        except GONE as error:
            visit.wire.leave()
            self.tally.ended(name, "cut", str(error) or type(error).__name__)
            await asyncio.sleep(FULL_SECONDS)
        except Exception as error:
            # An answer that this program cannot read is wrong too, and no reason for the others to end.
            visit.wire.leave()
            self.tally.ended(name, "wrong", f"{type(error).__name__}: {error}")
        finally:
            del self.under_way[mark]

    @property
    def _tenth(self) -> int:
        return min(TENTHS - 1, int(self.share * TENTHS))

    def _gap(self, seconds: float) -> None:
        self.tally.gaps[self._tenth].add(seconds)
