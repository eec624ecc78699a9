"""Several engines behind one front: each request goes to one of them, by what it has to do and has cached.

Invariants: requests that are submitted together run in one engine. The group is as healthy as its worst engine, and
dead with the first that dies: its GPUs are the server's, and nothing but a new start brings them back.
Knows nothing of text or HTTP, nor of how an engine is chosen (`placing.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.engine.messages import Ready
from stoker_runtime.engine.placing import SentPrefixes, chains_of, least_work
from stoker_runtime.engine.process import EngineProcess
from stoker_runtime.engine.stream import TokenStream
from stoker_runtime.errors import EngineDeadError, StokerError, UnsupportedError
from stoker_runtime.request import Adapter, EngineStats, Request


class EngineGroup:
    """`AsyncEngine` for several of them. Use from one event loop."""

    def __init__(self, engines: Sequence[AsyncEngine]) -> None:
        """`engines` are ready."""
        self.engines = tuple(engines)
        """Each by itself, in order."""
        # A model that pools keeps no pages.
        self._block = self.ready.page_size or 1
        self._sent = [SentPrefixes(self._block, each.ready.num_pages) for each in engines]
        self._turn = 0

    @classmethod
    async def start(cls, config: EngineConfig, processes: Sequence[EngineProcess]) -> EngineGroup:
        """Take over `processes`, which were spawned already, and wait for all. Errors as `AsyncEngine.start`."""
        return await cls._gather([AsyncEngine.start(config, process=process) for process in processes])

    @classmethod
    async def attach(cls, endpoints: Sequence[str]) -> EngineGroup:
        """Share the engines that listen at `endpoints`."""
        return await cls._gather([AsyncEngine.attach(endpoint) for endpoint in endpoints])

    @classmethod
    async def _gather(cls, starting: Sequence[Any]) -> EngineGroup:
        """The group of those that start; when one fails, or this is cancelled, all are closed."""
        tasks = [asyncio.ensure_future(each) for each in starting]
        try:
            return cls(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(each.close() for each in ended if isinstance(each, AsyncEngine)))
            raise

    @property
    def ready(self) -> Ready:
        """What the first engine decided on; they all have the same configuration."""
        return self.engines[0].ready

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where further API processes can attach."""
        return tuple(endpoint for each in self.engines for endpoint in each.endpoints)

    @property
    def max_model_len(self) -> int:
        """The most tokens of one sequence, prompt and output together."""
        return self.ready.max_model_len

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows: `0 … vocab_size - 1`."""
        return self.ready.vocab_size

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """None: adapters are served by one engine alone."""
        return {}

    async def load_adapter(self, name: str, path: str, *, parent: str = "", replace: bool = False) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError("Adapters are not served by several engines (--data-parallel-size).")

    async def unload_adapter(self, name: str) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError("Adapters are not served by several engines (--data-parallel-size).")

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        """As `AsyncEngine.sleep`, all engines; where one cannot, the others wake up again."""
        try:
            await _all(each.sleep(level, abort=abort) for each in self.engines)
        except StokerError:
            await _all(each.wake_up() for each in self.engines)
            raise

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """As `AsyncEngine.wake_up`, all engines; those that can stay awake where one cannot."""
        await _all(each.wake_up(tags) for each in self.engines)

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        """As `AsyncEngine.submit`, by the engine that has the least to do for them."""
        self.check_health()
        chains = chains_of([(each.prompt_token_ids, each.cache_salt) for each in requests], self._block)
        tokens = sum(len(each.prompt_token_ids) for each in requests)
        uncached = [tokens - sum(map(sent.cached, chains)) for sent in self._sent]
        chosen = least_work(uncached, [each.load for each in self.engines], self._turn)
        stream = self.engines[chosen].submit(requests)
        self._turn = (chosen + 1) % len(self.engines)
        for chain in chains:
            self._sent[chosen].note(chain)
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests, wherever they are."""
        for each in self.engines:
            each.abort(request_ids)

    def stats(self) -> EngineStats:
        """The numbers of the newest heartbeats, added up, the oldest step's age; lists are each engine's own."""
        every = [each.stats() for each in self.engines]
        numbers = [each.name for each in fields(EngineStats) if not isinstance(each.default, tuple)]
        added = {name: sum(getattr(stats, name) for stats in every) for name in numbers}
        return EngineStats(**added | {"step_age": max(stats.step_age for stats in every)})

    @property
    def open_requests(self) -> int:
        """Requests of this process that have not had their last output."""
        return sum(each.open_requests for each in self.engines)

    def check_health(self) -> None:
        """Raises EngineDeadError when an engine is dead or hangs, with its number."""
        for number, each in enumerate(self.engines):
            try:
                each.check_health()
            except EngineDeadError as error:
                raise numbered(number, error) from error

    async def died(self) -> EngineDeadError:
        """Wait until an engine is gone; what ended it."""
        waiting = [asyncio.ensure_future(each.died()) for each in self.engines]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return next(numbered(at, task.result()) for at, task in enumerate(waiting) if task.done())
        finally:
            for task in waiting:
                task.cancel()

    async def close(self) -> None:
        """Stop the engines. Idempotent."""
        await asyncio.gather(*(each.close() for each in self.engines))


async def start_engines(config: EngineConfig, processes: Sequence[EngineProcess]) -> AsyncEngine | EngineGroup:
    """The front of the engines in `processes`, one or several. Errors as `AsyncEngine.start`."""
    if len(processes) == 1:
        return await AsyncEngine.start(config, process=processes[0])
    return await EngineGroup.start(config, processes)


async def attach_engines(endpoints: Sequence[str]) -> AsyncEngine | EngineGroup:
    """The same of engines that another process started."""
    return await (AsyncEngine.attach(endpoints[0]) if len(endpoints) == 1 else EngineGroup.attach(endpoints))


async def _all(doing: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all, then raise the first error."""
    ended = await asyncio.gather(*doing, return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error


def numbered(number: int, error: EngineDeadError) -> EngineDeadError:
    """The error, with the engine that it is of."""
    return EngineDeadError(f"Engine {number}: {error.message}")
