"""Runs batches beside interactive requests: each line is a request of this server to itself, a few at a time.

    validating → in_progress → finalizing → completed
         ↓             ↘ (deadline)    ↘ expired
       failed           ↘ (cancel: cancelling) → cancelled

Invariants: a line's result is on the disk before the line counts as done, so after a restart no finished line runs
again and every other one does; a new line begins only while no request waits in the engine; what is full (the queue,
the disk) or starting is waited for and never becomes a line's result.
Knows nothing of HTTP, or of how requests are answered.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker_runtime.api.batch.file_store import FileStore, load_record, new_file_id
from stoker_runtime.api.batch.folder import FolderLock, storage_errors, write_json
from stoker_runtime.api.batch.lines import Line, ResultFile, check_lines, parse_line, raw_lines
from stoker_runtime.api.batch.records import UNFINISHED, entered
from stoker_runtime.errors import NotFoundError, RequestError, StorageError

Execute = Callable[[str, Line], Awaitable[dict[str, Any]]]
"""Runs a line of an endpoint: its entry in the results. Raises nothing that is the line's own fault."""

log = logging.getLogger(__name__)
CALM_SECONDS = 0.02
RETRY_SECONDS = 5.0
RESULTS = {"output": "output_file_id", "errors": "error_file_id"}
EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


class BatchRunner:
    """The batches of one server. Use from one event loop; nothing runs before `start`."""

    def __init__(self, folder: Path, execute: Execute, busy: Callable[[], bool], concurrency: int) -> None:
        """Take the folder over. Raises ConfigError when it cannot be used."""
        self._lock = FolderLock(folder)
        self._folder = folder / "batches"
        self._folder.mkdir(exist_ok=True)
        self._records = self._load()
        coming = {record[field] for record in self._records.values() for field in RESULTS.values()}
        self.files = FileStore(folder / "files", coming)
        self.retry_seconds = RETRY_SECONDS
        self._execute = execute
        self._busy = busy
        self._slots = asyncio.Semaphore(concurrency)
        self._saving = asyncio.Lock()
        self._running = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._work: dict[str, asyncio.Task[None]] = {}

    def _load(self) -> dict[str, dict[str, Any]]:
        found = [record for path in self._folder.glob("*/batch.json") if (record := load_record(path)) is not None]
        return {record["id"]: record for record in sorted(found, key=lambda record: record["created_at"])}

    def start(self) -> None:
        """Go on with everything that is not finished."""
        self._running = True
        for name, record in self._records.items():
            if record["status"] in UNFINISHED:
                self._spawn(name)

    async def stop(self) -> None:
        """Stop at once; what was under way is left for the next start."""
        self._running = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Give the folder up."""
        self._lock.close()

    def records(self) -> list[dict[str, Any]]:
        """All batches, oldest first."""
        return list(self._records.values())

    def get(self, name: str) -> dict[str, Any]:
        """One batch. Raises NotFoundError."""
        if name not in self._records:
            raise NotFoundError(f"No batch found with id '{name}'.", param="batch_id")
        return self._records[name]

    def check_unused(self, file_id: str) -> None:
        """Raise RequestError where an unfinished batch reads this file."""
        for record in self._records.values():
            if record["input_file_id"] == file_id and record["status"] in UNFINISHED:
                raise RequestError(f"{file_id} is the input of {record['id']}, which is not finished.", param="file_id")

    async def add(self, record: dict[str, Any]) -> None:
        """Take on a new batch. Raises StorageError."""
        place = self._place(record["id"])
        try:
            with storage_errors():
                place.mkdir()
            await self._save(record)
        except StorageError:
            self._records.pop(record["id"], None)
            shutil.rmtree(place, ignore_errors=True)
            raise
        if self._running:
            self._spawn(record["id"])

    async def cancel(self, name: str) -> dict[str, Any]:
        """Let no further line of a batch run. Raises NotFoundError, RequestError or StorageError."""
        record = self.get(name)
        if record["status"] == "cancelling":
            return record
        if record["status"] not in ("validating", "in_progress"):
            raise RequestError(f"Cannot cancel a batch with status '{record['status']}'.", param="batch_id")
        await self._save(entered(record, "cancelling"))
        work = self._work.get(name)
        if work is not None:
            work.cancel()
        return self.get(name)

    def _place(self, name: str) -> Path:
        return self._folder / name

    async def _save(self, record: dict[str, Any]) -> None:
        """Make `record` the batch's newest, at once for everybody here, then on the disk. Raises StorageError."""
        name = record["id"]
        self._records[name] = record
        async with self._saving:
            await asyncio.to_thread(write_json, self._place(name) / "batch.json", self._records[name])

    def _spawn(self, name: str) -> None:
        task = asyncio.create_task(self._run(name))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name))

    async def _run(self, name: str) -> None:
        """Bring one batch to its end. A disk that is full is waited for."""
        while True:
            try:
                await self._advance(name)
                return
            except (StorageError, OSError) as error:
                log.error("%s waits: %s", name, error)
                await asyncio.sleep(self.retry_seconds)
            except Exception:
                log.exception("%s failed.", name)
                wrong = {"code": "server_error", "line": None, "message": "The server failed.", "param": None}
                await self._fail(name, [wrong])
                return

    async def _fail(self, name: str, errors: list[dict[str, Any]]) -> None:
        await self._save(entered(self.get(name), "failed", errors={"object": "list", "data": errors}))

    async def _advance(self, name: str) -> None:
        """The steps of one batch, from wherever it stands."""
        record = self.get(name)
        if record["status"] == "validating":
            path = self.files.path(record["input_file_id"])
            total, errors = await asyncio.to_thread(check_lines, path, record["endpoint"])
            if errors and self.get(name)["status"] == "validating":
                await self._fail(name, errors)
                return
            if self.get(name)["status"] == "validating":
                counts = {**record["request_counts"], "total": total}
                await self._save(entered(record, "in_progress", request_counts=counts))
        if self.get(name)["status"] in ("in_progress", "cancelling"):
            ending = await self._lines(name)
            ids = {RESULTS[kind]: new_file_id() for kind in RESULTS if self._result_path(name, kind).stat().st_size}
            await self._save(entered(self.get(name), "finalizing", ending=ending, **ids))
        await self._finalize(name)

    def _result_path(self, name: str, kind: str) -> Path:
        return self._place(name) / f"{kind}.jsonl"

    async def _finalize(self, name: str) -> None:
        """Make the results files of their own. Every step may be repeated after a crash."""
        record = self.get(name)
        for kind, field in RESULTS.items():
            if record[field] is not None:
                path = self._result_path(name, kind)
                filename = f"{name}_{kind}.jsonl"
                await asyncio.to_thread(self.files.add, path, filename, "batch_output", record[field])
            else:
                self._result_path(name, kind).unlink(missing_ok=True)
        ending = record["ending"]
        await self._save(entered({key: value for key, value in record.items() if key != "ending"}, ending))

    async def _lines(self, name: str) -> str:
        """Run the lines that have no result yet, until the end, the deadline or a cancel. The status to end with."""
        results = {kind: await asyncio.to_thread(ResultFile, self._result_path(name, kind)) for kind in RESULTS}
        self._count(name, results)
        record = self.get(name)
        try:
            if record["status"] == "cancelling":
                return "cancelled"
            work = self._work[name] = asyncio.create_task(self._work_off(name, results))
            try:
                await asyncio.wait({work}, timeout=max(record["expires_at"] - time.time(), 0))
                expired = not work.done()
            finally:
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
                del self._work[name]
            if self.get(name)["status"] == "cancelling":
                return "cancelled"
            late = await asyncio.to_thread(self._expire, name, results) if expired else 0
            self._count(name, results)
            return "expired" if late else "completed"
        finally:
            for result in results.values():
                result.close()

    def _count(self, name: str, results: Mapping[str, ResultFile]) -> None:
        """Let the record tell how many lines are done. It is stored with the next status."""
        record = self.get(name)
        done = {"completed": len(results["output"].done), "failed": len(results["errors"].done)}
        self._records[name] = {**record, "request_counts": {**record["request_counts"], **done}}

    async def _work_off(self, name: str, results: Mapping[str, ResultFile]) -> None:
        """Start the lines one after the other, as slots become free and while nobody waits in the engine."""
        record = self.get(name)
        path = self.files.path(record["input_file_id"])
        done = results["output"].done | results["errors"].done
        async with asyncio.TaskGroup() as group:
            for number, raw in raw_lines(path):
                line = parse_line(number, raw, record["endpoint"])
                if line.custom_id in done:
                    continue
                await self._slots.acquire()
                # Given back by the task's end, for a task that is cancelled early never begins.
                task = group.create_task(self._line(name, line, results))
                task.add_done_callback(lambda _: self._slots.release())
                await asyncio.sleep(0)
                while self._busy():
                    await asyncio.sleep(CALM_SECONDS)

    async def _line(self, name: str, line: Line, results: Mapping[str, ResultFile]) -> None:
        """Run one line and put its result on the disk."""
        outcome = await self._execute(self.get(name)["endpoint"], line)
        kind = "output" if outcome["response"]["status_code"] == 200 else "errors"
        while True:
            try:
                await asyncio.to_thread(results[kind].append, line.custom_id, outcome)
                break
            except StorageError as error:
                log.error("%s waits: %s", name, error.message)
                await asyncio.sleep(self.retry_seconds)
        self._count(name, results)

    def _expire(self, name: str, results: Mapping[str, ResultFile]) -> int:
        """Say of every line without a result that its time was up; of how many."""
        record, late = self.get(name), 0
        done = results["output"].done | results["errors"].done
        for number, raw in raw_lines(self.files.path(record["input_file_id"])):
            line = parse_line(number, raw, record["endpoint"])
            if line.custom_id not in done:
                entry = {"id": f"batch_req_{number}", "custom_id": line.custom_id, "response": None, "error": EXPIRED}
                results["errors"].append(line.custom_id, entry)
                late += 1
        return late
