"""Runs batches beside interactive requests: each line is a request of this server to itself, a few at a time.

    validating → in_progress → finalizing → completed
         ↓             ↘ (deadline)    ↘ expired
       failed           ↘ (cancel: cancelling) → cancelled

Every process that shares the folder looks for batches that nobody runs, and runs those that it can claim; a claim ends
with its process, so another one goes on with what a dead one left.
Invariants: every step may be repeated after a crash; a disk that is full is waited for.
Knows nothing of HTTP, or of how requests are answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker_runtime.api.batch.batch_store import BatchStore, Record
from stoker_runtime.api.batch.file_store import PREFIX, FileStore
from stoker_runtime.api.batch.folder import Claim, new_id, owner_of
from stoker_runtime.api.batch.lines import check_lines
from stoker_runtime.api.batch.records import entered
from stoker_runtime.api.batch.work import POLL_SECONDS, RETRY_SECONDS, BatchWork, Execute, Turns
from stoker_runtime.errors import NotFoundError, StorageError

log = logging.getLogger(__name__)
RESULTS = {"output": "output_file_id", "errors": "error_file_id"}


class BatchRunner:
    """What runs batches in one process. Use from one event loop; nothing runs before `start`."""

    def __init__(
        self, folder: Path, execute: Execute, room: Callable[[], int], concurrency: int, line_bytes: int
    ) -> None:
        """Raises ConfigError when the folder cannot be used.

        `line_bytes`: of the longest line. `looked`: how often it looked for batches so far.
        """
        self._line_bytes = line_bytes
        self.batches = BatchStore(folder / "batches")
        coming = {str(record.get(field)) for record in self.batches.unfinished() for field in RESULTS.values()}
        self.files = FileStore(folder / "files", coming)
        self.poll_seconds = POLL_SECONDS
        self.retry_seconds = RETRY_SECONDS
        self._execute = execute
        self._turns = Turns(concurrency, room)
        self._news = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.looked = 0

    def start(self) -> None:
        """Go on with everything that is not finished, and with what comes."""
        self._watch = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Stop at once; what was under way is left for the next start, or for another process."""
        tasks = [*self._tasks.values(), *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Look for new batches now."""
        self._news.set()

    async def _look(self) -> None:
        """Run what nobody runs yet, for ever."""
        while True:
            self._news.clear()
            try:
                for name, claim in await asyncio.to_thread(self._claims, set(self._tasks)):
                    self._tasks[name] = asyncio.create_task(self._run(name, claim))
            except OSError as error:
                log.error("The folder of batches cannot be read: %s", error)
            except Exception:
                # Of one batch, perhaps: the others go on.
                log.exception("Looking for batches failed.")
            self.looked += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self.poll_seconds)

    def _claims(self, own: set[str]) -> list[tuple[str, Claim]]:
        """The unfinished batches that this process may run from now on. Raises OSError."""
        found: list[tuple[str, Claim]] = []
        for record in self.batches.unfinished():
            claim = None if record["id"] in own else self.batches.claim(record["id"])
            if claim is not None:
                found.append((record["id"], claim))
        return found

    async def _run(self, name: str, claim: Claim) -> None:
        """Bring one batch to its end. A disk that is full is waited for."""
        try:
            while True:
                try:
                    # Read after the claim: the owner before may have written meanwhile.
                    await self._advance(await asyncio.to_thread(self.batches.get, name))
                    return
                except (StorageError, OSError) as error:
                    log.error("%s waits: %s", name, error)
                    await asyncio.sleep(self.retry_seconds)
        except Exception:
            log.exception("%s failed.", name)
            wrong = {"code": "server_error", "line": None, "message": "The server failed.", "param": None}
            with suppress(NotFoundError, StorageError):
                await self._fail(await asyncio.to_thread(self.batches.get, name), [wrong])
        finally:
            claim.release()
            del self._tasks[name]

    async def _save(self, record: Record) -> Record:
        await asyncio.to_thread(self.batches.save, record)
        return record

    async def _fail(self, record: Record, errors: list[dict[str, Any]]) -> None:
        await self._save(entered(record, "failed", errors={"object": "list", "data": errors}))

    async def _advance(self, record: Record) -> None:
        """The steps of one batch, from wherever it stands."""
        if record["status"] == "validating":
            try:
                path = await asyncio.to_thread(self.files.path, record["input_file_id"])
            except NotFoundError:
                gone = {"code": "input_file_missing", "line": None, "message": "The file is gone.", "param": None}
                await self._fail(record, [gone])
                return
            total, errors = await asyncio.to_thread(check_lines, path, record["endpoint"], self._line_bytes)
            if errors:
                await self._fail(record, errors)
                return
            counts = {**record["request_counts"], "total": total}
            record = await self._save(entered(record, "in_progress", request_counts=counts))
        if record["status"] in ("in_progress", "cancelling"):
            paths = {kind: self._result_path(record["id"], kind) for kind in RESULTS}
            path = await asyncio.to_thread(self.files.path, record["input_file_id"])
            work = BatchWork(record, path, paths, self._execute, self._turns, self._line_bytes)
            work.poll_seconds, work.retry_seconds = self.poll_seconds, self.retry_seconds
            record, ending = await work.run(self.batches)
            ids = {RESULTS[kind]: new_id(PREFIX) for kind, path in paths.items() if path.stat().st_size}
            record = await self._save(entered(record, "finalizing", ending=ending, **ids))
        if record["status"] == "finalizing":
            await self._finalize(record)

    def _result_path(self, name: str, kind: str) -> Path:
        """Where the results of a batch grow."""
        return self.batches.place(name) / f"{kind}.jsonl"

    async def _finalize(self, record: Record) -> None:
        """Make the results files of their own. Every step may be repeated after a crash."""
        name = record["id"]
        for kind, field in RESULTS.items():
            path = self._result_path(name, kind)
            if record[field] is not None:
                filename = f"{name}_{kind}.jsonl"
                owner = owner_of(record)
                await asyncio.to_thread(self.files.add, path, filename, "batch_output", record[field], owner)
            else:
                path.unlink(missing_ok=True)
        ending = record["ending"]
        await self._save(entered({key: value for key, value in record.items() if key != "ending"}, ending))
