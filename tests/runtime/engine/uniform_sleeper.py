"""What puts the uniform executor to sleep: its pages lose what they hold, as slowly and as badly as a test says.

A folder says it, so that a test can say it to another process: while `busy` is there nothing comes to an end, while
`refuses` is there everything fails.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from stoker_runtime.errors import UnavailableError
from stoker_runtime.request import WAKE_TAGS


class UniformSleeper:
    """`pages` are the executor's `kv`."""

    def __init__(self, folder: Path) -> None:
        self.pages: list[list[int | None]] = []
        self.level = 0
        self._gone: set[str] = set()
        self._folder = folder

    @property
    def asleep(self) -> bool:
        return bool(self._gone)

    @property
    def bytes_freed(self) -> int:
        return 1000 * len(self._gone)

    @property
    def host_bytes(self) -> int:
        return 500 if self.level == 1 else 0

    def sleep(self, level: int) -> None:
        """Nothing less deep than before."""
        self._work()
        self.level, self._gone = max(self.level, level), set(WAKE_TAGS)
        for page in self.pages:
            page[:] = [None] * len(page)

    def wake(self, tags: Collection[str]) -> None:
        """What was in the pages is lost."""
        self._work()
        self._gone -= set(tags)
        self.level = self.level if self._gone else 0

    def _work(self) -> None:
        (self._folder / "working").touch()
        while (self._folder / "busy").exists():
            time.sleep(0.01)
        (self._folder / "working").unlink()
        if (self._folder / "refuses").exists():
            raise UnavailableError("There is no room.", code="no_memory")
