"""What a server needs of the engine, or the engines, that it started.

Invariants: protocols alone: `AsyncEngine` and `EngineGroup` are such, and what tests put in their place.
Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from stoker_runtime.api.generate.engine_client import EngineClient
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import EngineDeadError


class ReadySizes(Protocol):
    """What a started engine decided on."""

    @property
    def page_size(self) -> int:
        """Tokens of a KV page."""
        ...

    @property
    def num_pages(self) -> int:
        """KV pages."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    @property
    def description(self) -> Mapping[str, str]:
        """What the engine says of itself."""
        ...


class Mortal(Protocol):
    """An engine that can die."""

    async def died(self) -> EngineDeadError:
        """Wait until the engine process is gone; what ended it."""
        ...


class ReadyEngine(EngineClient, Protocol):
    """An engine that has started."""

    @property
    def ready(self) -> ReadySizes:
        """The sizes that the engine decided on."""
        ...


class OwnedEngine(ReadyEngine, Mortal, Protocol):
    """An engine, or several as one, that this process started and must close."""

    @property
    def engines(self) -> Sequence[ReadyEngine]:
        """Each by itself."""
        ...

    async def close(self) -> None:
        """Stop the engine process. Idempotent."""
        ...


StartEngine = Callable[[EngineConfig], Awaitable[OwnedEngine]]
