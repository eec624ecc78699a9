"""The lines of one batch while they run: a few at a time, behind everybody else.

Invariants: a line's result is on the disk before the line counts as done, so after a restart no finished line runs
again and every other one does; while requests wait in the engine, lines have a small share of it and no more; a disk
that is full is waited for.
Knows nothing of HTTP, or of how requests are answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker_runtime.api.batch.batch_store import BatchStore, Record
from stoker_runtime.api.batch.folder import owner_of
from stoker_runtime.api.batch.lines import Line, ResultFile, parse_line, raw_lines
from stoker_runtime.api.batch.records import entered
from stoker_runtime.errors import StorageError

Execute = Callable[[str, Line, str], Awaitable[dict[str, Any]]]
"""Runs a line of an endpoint for an owner: its entry in the results. Raises nothing that is the line's own fault."""

log = logging.getLogger(__name__)
CALM_SECONDS = 0.02
POLL_SECONDS = 1.0
RETRY_SECONDS = 5.0
EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


class Turns:
    """Who may begin: as many lines of all batches at a time as `room` says and at most `limit`, one after the other."""

    def __init__(self, limit: int, room: Callable[[], int]) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._first = asyncio.Lock()
        self._room = room
        self._taken = 0

    async def take(self) -> None:
        """Wait until one more line may begin."""
        await self._slots.acquire()
        try:
            async with self._first:
                while self._taken >= self._room():
                    await asyncio.sleep(CALM_SECONDS)
                self._taken += 1
        except asyncio.CancelledError:
            self._slots.release()
            raise

    def give_back(self, _: object) -> None:
        """A line is over."""
        self._taken -= 1
        self._slots.release()


class BatchWork:
    """The work on one batch, whose requests stand in `path`, a line of at most `line_bytes` each.

    Its results go to `results`.
    """

    def __init__(
        self,
        record: Record,
        path: Path,
        results: Mapping[str, Path],
        execute: Execute,
        turns: Turns,
        line_bytes: int,
    ) -> None:
        self._line_bytes = line_bytes
        self.poll_seconds = POLL_SECONDS
        self.retry_seconds = RETRY_SECONDS
        self._record = record
        self._path = path
        self._paths = results
        self._execute = execute
        self._turns = turns
        self._results: Mapping[str, ResultFile] = {}

    async def run(self, batches: BatchStore) -> tuple[Record, str]:
        """Run what has no result yet, until the end, the deadline or a cancel. The record, and the status to end with.

        Raises StorageError.
        """
        self._results = {kind: await asyncio.to_thread(ResultFile, path) for kind, path in self._paths.items()}
        try:
            ending = await self._work(batches) if self._record["status"] == "in_progress" else "cancelled"
            if ending == "expired" and not await asyncio.to_thread(self._expire):
                ending = "completed"
        finally:
            for result in self._results.values():
                result.close()
        return self._counted(), ending

    async def _work(self, batches: BatchStore) -> str:
        """Let the lines run, and look now and then whether they still should; tell everybody how far they are."""
        work = asyncio.create_task(self._start_lines())
        try:
            while True:
                left = self._record["expires_at"] - time.time()
                await asyncio.wait({work}, timeout=max(min(left, self.poll_seconds), 0))
                if work.done():
                    return "completed"
                if await asyncio.to_thread(batches.cancel_asked, self._record["id"]):
                    self._record = entered(self._record, "cancelling")
                    return "cancelled"
                if left <= 0:
                    return "expired"
                if (counted := self._counted()) != self._record:
                    self._record = counted
                    await asyncio.to_thread(batches.save, counted)
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    def _counted(self) -> Record:
        """The record, with the lines that are done by now."""
        done = {"completed": len(self._results["output"].done), "failed": len(self._results["errors"].done)}
        return {**self._record, "request_counts": {**self._record["request_counts"], **done}}

    def _missing(self) -> Iterator[Line]:
        """The lines that have no result yet."""
        done = self._results["output"].done | self._results["errors"].done
        for number, raw in raw_lines(self._path, self._line_bytes):
            line = parse_line(number, raw, self._record["endpoint"], self._line_bytes)
            if line.custom_id not in done:
                yield line

    async def _start_lines(self) -> None:
        """Start the lines one after the other, and wait for all."""
        lines = self._missing()
        async with asyncio.TaskGroup() as group:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                await self._turns.take()
                # Given back by the task's end, for a task that is cancelled early never begins.
                group.create_task(self._line(line)).add_done_callback(self._turns.give_back)

    async def _line(self, line: Line) -> None:
        """Run one line and put its result on the disk."""
        outcome = await self._execute(self._record["endpoint"], line, owner_of(self._record))
        kind = "output" if outcome["response"]["status_code"] == 200 else "errors"
        while True:
            try:
                await asyncio.to_thread(self._results[kind].append, line.custom_id, outcome)
                return
            except StorageError as error:
                log.error("%s waits: %s", self._record["id"], error.message)
                await asyncio.sleep(self.retry_seconds)

    def _expire(self) -> int:
        """Say of every line without a result that its time was up; of how many. Raises StorageError."""
        late = 0
        for line in self._missing():
            entry = {"id": f"batch_req_{line.number}", "custom_id": line.custom_id, "response": None, "error": EXPIRED}
            self._results["errors"].append(line.custom_id, entry)
            late += 1
        return late
