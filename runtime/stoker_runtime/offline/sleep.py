"""`LLM.sleep` and `LLM.wake_up`: the model gives its memory back for a while, to a training step for one.

Knows nothing of how memory is given back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from stoker_runtime.engine.step_loop import StepLoop


class Sleeps(ABC):
    """What of `LLM` sleeps."""

    @property
    @abstractmethod
    def _loop(self) -> StepLoop: ...

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back; `LLM(enable_sleep_mode=True)` allows it.

        Level 1 keeps the weights in host memory (on a CPU where they are) and drops KV; level 2 drops both, and reads
        the weights from their files at `wake_up`. Raises UnavailableError where the host has no room, RequestError for
        another level.
        """
        self._loop.sleeper.now(partial(self._loop.sleeper.sleep, level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again, or of `tags` "weights" and "kv_cache" those that are named.

        Raises UnavailableError where the device has no room, ModelError for files that are not what they were: it
        sleeps on.
        """
        self._loop.sleeper.now(partial(self._loop.sleeper.wake, tuple(tags or ())))
