"""The responses that clients may ask for again, those under way in the background, and their events: one SQLite table.

A server of one process keeps it in memory; several share a file in a folder of their own, which ends with the server.
Every process may read and end every response; each running one has the process that makes it. A response is found only
by who owns it, and its name is taken only among theirs.

Invariants: what is finished holds at most `max_bytes`, the least recently used goes first; what runs is never dropped.
A response keeps the conversation before it, so it counts that too. A response and the events that led to it change in
one transaction. Nothing here waits for anything but the disk and the other processes' writes; call it from a thread.
Knows nothing of how responses are made.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from stoker_runtime.errors import NotFoundError, RequestError, StorageError

Item = dict[str, Any]
Events = Sequence[tuple[int, str]]
"""Sequence numbers, and events as they are sent."""

PATIENCE_SECONDS = 30.0
"""For other processes' writes, each of which takes milliseconds."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    name TEXT PRIMARY KEY, process INTEGER, running INTEGER, cancel INTEGER, used INTEGER, size INTEGER,
    response TEXT, items TEXT, history TEXT
);
CREATE INDEX IF NOT EXISTS age ON responses (used, size);
CREATE TABLE IF NOT EXISTS events (name TEXT, number INTEGER, event TEXT, PRIMARY KEY (name, number)) WITHOUT ROWID;
"""
ORPHANED = {"code": "server_error", "message": "The server's process that made this response ended."}


@dataclass(slots=True)
class Stored:
    """A response, the items that it was asked with, those of the conversation before them, and who owns it."""

    response: dict[str, Any]
    items: Sequence[Item]
    history: Sequence[Item] = ()
    running: bool = False
    owner: str = ""

    @property
    def key(self) -> str:
        """What the store knows it by."""
        return _key(self.response["id"], self.owner)

    def conversation(self) -> list[Item]:
        """Everything said so far, the response's own output last."""
        return [*self.history, *self.items, *self.response["output"]]


class ResponseStore:
    """One process's view of the store. `max_bytes` 0 keeps nothing."""

    def __init__(self, max_bytes: int, path: str = "", process: int = 0) -> None:
        """`path` is the file that several processes share; without one this process is alone.

        What a process before this one, with the same number, left running has failed.
        """
        self.max_bytes = max_bytes
        self._process = process
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            path or ":memory:", PATIENCE_SECONDS, isolation_level=None, check_same_thread=False
        )
        weakref.finalize(self, self._database.close)
        if path:
            # Readers and the writer do not wait for each other, and a killed process breaks nothing. What the machine
            # would lose in a crash ends with the server anyway.
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = OFF")
        self._database.executescript(SCHEMA)
        self._bury()

    def begin(self, stored: Stored) -> None:
        """Take in a response that this process is about to make in the background."""
        with self._writing():
            self._insert(stored, running=True)

    def advance(self, stored: Stored, response: dict[str, Any] | None, events: Events) -> bool:
        """Add events of a running response, and what it is like now; whether its end is wanted, or it is gone."""
        key = stored.key
        with self._writing():
            if response is not None:
                self._database.execute("UPDATE responses SET response = ? WHERE name = ?", (_text(response), key))
            self._append(key, events)
            found = self._database.execute("SELECT cancel FROM responses WHERE name = ?", (key,)).fetchone()
            return found is None or bool(found[0])

    def put(self, stored: Stored, events: Events = ()) -> None:
        """Keep a finished response with its last events, and drop the oldest where room is short.

        One that is larger than all is not kept.
        """
        with self._writing():
            self._append(stored.key, events)
            size = self._insert(stored, running=False)
            if size > self.max_bytes:
                self._drop(stored.key)
            else:
                self._make_room()

    def get(self, name: str, owner: str = "") -> Stored:
        """A response of an owner, finished or not. Raises NotFoundError."""
        with self._writing():
            found = self._database.execute(
                "UPDATE responses SET used = ? WHERE name = ? RETURNING response, items, history, running",
                (time.time_ns(), _key(name, owner)),
            ).fetchone()
        if found is None:
            raise NotFoundError(f"Response with id '{name[:80]}' not found.", param="response_id")
        response, items, history, running = found
        return Stored(json.loads(response), json.loads(items), json.loads(history), bool(running), owner)

    def known(self, name: str, owner: str = "") -> bool:
        """Whether an owner has a response of this name."""
        with self._reading():
            found = self._database.execute("SELECT 1 FROM responses WHERE name = ?", (_key(name, owner),))
            return bool(found.fetchone())

    def events(self, name: str, after: int, owner: str = "") -> tuple[list[tuple[int, str]], bool]:
        """The events of a background response behind number `after`, and whether no more will come.

        Raises NotFoundError.
        """
        key = _key(name, owner)
        with self._reading():
            row = self._database.execute("SELECT running FROM responses WHERE name = ?", (key,)).fetchone()
            found = self._database.execute(
                "SELECT number, event FROM events WHERE name = ? AND number > ? ORDER BY number", (key, after)
            ).fetchall()
        if row is None:
            raise NotFoundError(f"Response with id '{name[:80]}' not found.", param="response_id")
        return found, not row[0]

    def cancel(self, name: str, owner: str = "") -> bool:
        """Ask the process that makes a response to end it; whether it still runs."""
        key = _key(name, owner)
        with self._writing():
            asked = self._database.execute("UPDATE responses SET cancel = 1 WHERE name = ? AND running", (key,))
            return asked.rowcount > 0

    def discard(self, name: str, owner: str = "") -> None:
        """Forget a response."""
        with self._writing():
            self._drop(_key(name, owner))

    def require(self, param: str) -> None:
        """Raise RequestError, blaming `param`, where nothing is kept."""
        if not self.max_bytes:
            raise RequestError(
                f"{param} needs a server that keeps responses, that is with --response-store-bytes above 0.",
                param=param,
            )

    def previous(self, name: str, owner: str = "") -> Stored:
        """A finished response of an owner, to go on with. Raises RequestError."""
        self.require("previous_response_id")
        try:
            found = self.get(name, owner)
        except NotFoundError:
            raise RequestError(
                f"Previous response with id '{name[:80]}' not found; it may have been dropped, or was not stored.",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None
        if found.running:
            raise RequestError(
                f"Previous response with id '{name}' is not finished.",
                param="previous_response_id",
                code="previous_response_not_finished",
            )
        return found

    @contextmanager
    def _reading(self, begin: str = "BEGIN") -> Iterator[None]:
        """One transaction, which sees one state of the store. Raises StorageError."""
        with self._lock:
            try:
                self._database.execute(begin)
                try:
                    yield
                except BaseException:
                    self._database.execute("ROLLBACK")
                    raise
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                raise StorageError(f"The store of responses failed: {error}.", code="response_store_failed") from error

    def _writing(self) -> AbstractContextManager[None]:
        """One transaction; nobody else, in this process or another, changes anything meanwhile. Raises StorageError."""
        return self._reading("BEGIN IMMEDIATE")

    def _insert(self, stored: Stored, *, running: bool) -> int:
        """Write a response in place of what there was; its size with its events."""
        key = stored.key
        texts = [_text(stored.response), _text(stored.items), _text(stored.history)]
        size = sum(map(len, texts))
        size += self._database.execute("SELECT total(length(event)) FROM events WHERE name = ?", (key,)).fetchone()[0]
        self._database.execute(
            "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, 0, ?, ?, ?, ?, ?)",
            (key, self._process, running, time.time_ns(), 0 if running else int(size), *texts),
        )
        return int(size)

    def _append(self, name: str, events: Iterable[tuple[int, str]]) -> None:
        rows = ((name, number, text) for number, text in events)
        self._database.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)

    def _make_room(self) -> None:
        total = self._database.execute("SELECT total(size) FROM responses").fetchone()[0]
        while total > self.max_bytes:
            name, size = self._database.execute(
                "SELECT name, size FROM responses WHERE NOT running ORDER BY used LIMIT 1"
            ).fetchone()
            self._drop(name)
            total -= size

    def _drop(self, name: str) -> None:
        self._database.execute("DELETE FROM responses WHERE name = ?", (name,))
        self._database.execute("DELETE FROM events WHERE name = ?", (name,))

    def _bury(self) -> None:
        """Let what a process that is gone was making have failed."""
        with self._writing():
            left = self._database.execute(
                "SELECT name, response FROM responses WHERE running AND process = ?", (self._process,)
            ).fetchall()
            for name, text in left:
                response = {**json.loads(text), "status": "failed", "error": ORPHANED}
                number = self._database.execute(
                    "SELECT coalesce(max(number) + 1, 0) FROM events WHERE name = ?", (name,)
                ).fetchone()[0]
                event = {"type": "response.failed", "sequence_number": number, "response": response}
                self._append(name, [(number, f"event: response.failed\ndata: {_text(event)}\n\n")])
                self._database.execute(
                    "UPDATE responses SET running = 0, size = ?, response = ? WHERE name = ?",
                    (len(text), _text(response), name),
                )


def _key(name: str, owner: str) -> str:
    # No header holds a line end, so no name does in another's place.
    return f"{owner}\n{name}"


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
