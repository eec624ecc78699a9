"""The lines of a batch: requests in, results out.

Invariants: every line is checked before the first one runs; a result is on its file whole or not at all, so that
after a crash the file says exactly what need not run again.
Knows nothing of routes or of how lines run.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from stoker_runtime.api.batch.folder import storage_errors
from stoker_runtime.api.http.answers import in_steps, written
from stoker_runtime.api.http.aside import LARGE_BYTES, in_turn
from stoker_runtime.api.http.validation import sent
from stoker_runtime.api.tools.parsers.base import speakable
from stoker_runtime.errors import RequestError

MAX_ERRORS = 100
PIECE = 1024 * 1024
_BEGINNING = re.compile(rb'\{"id": ?"[^"\\]*", ?"custom_id": ?("(?:[^"\\]|\\.)*")[,}]')


@dataclass(frozen=True, slots=True)
class Line:
    """One request, in a line of `size` bytes. `number` counts from 1."""

    number: int
    custom_id: str
    body: dict[str, Any]
    size: int


class LineError(ValueError):
    """A line that is no request. `code` and `param` are OpenAI's."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def parse_line(number: int, raw: bytes, endpoint: str, most: int) -> Line:
    """The request of one line of at most `most` bytes. Raises LineError."""
    if len(raw) > most:
        raise LineError("line_too_large", f"This line has more than {most} bytes, the most that a request may have.")
    try:
        found = in_turn(len(raw) > LARGE_BYTES, lambda: sent(raw))
    except RequestError as error:
        raise LineError("invalid_json_line", error.message.replace("The body", "This line", 1)) from None
    except (ValueError, RecursionError):
        raise LineError("invalid_json_line", "This line is not parseable as valid JSON.") from None
    if not isinstance(found, dict):
        raise LineError("invalid_json_line", "This line is not a JSON object.")
    custom_id, body = found.get("custom_id"), found.get("body")
    if not isinstance(custom_id, str) or not custom_id or not speakable(custom_id):
        raise LineError("missing_required_parameter", "custom_id must be a string that is not empty.", "custom_id")
    if found.get("method") != "POST":
        raise LineError("invalid_method", "method must be POST.", "method")
    if found.get("url") != endpoint:
        raise LineError("mismatched_endpoint", f"url must be {endpoint}, the batch's endpoint.", "url")
    if not isinstance(body, dict):
        raise LineError("missing_required_parameter", "body must be an object.", "body")
    return Line(number, custom_id, body, len(raw))


def raw_lines(path: Path, most: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1; of one beyond `most` bytes the beginning.

    Raises OSError.
    """
    with path.open("rb") as file:
        number = 0
        # With room for the line's end.
        while raw := file.readline(most + 2):
            number += 1
            cut = len(raw) == most + 2 and not raw.endswith(b"\n")
            rest = raw if cut else b""
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(PIECE)
            if cut or raw.strip():
                yield number, raw if cut else raw.strip()


def check_lines(path: Path, endpoint: str, most: int) -> tuple[int, list[dict[str, Any]]]:
    """How many requests a file holds, and what is wrong with it, at most `MAX_ERRORS` things. Raises OSError."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    total = 0
    for number, raw in raw_lines(path, most):
        total += 1
        try:
            line = parse_line(number, raw, endpoint, most)
            if line.custom_id in seen:
                raise LineError("duplicate_custom_id", "Another line has this custom_id.", "custom_id")
            seen.add(line.custom_id)
        except LineError as error:
            errors.append({"code": error.code, "line": number, "message": str(error), "param": error.param})
            if len(errors) == MAX_ERRORS:
                break
    if not total:
        errors.append({"code": "empty_file", "line": None, "message": "The file holds no requests.", "param": None})
    return total, errors


def _custom_id(raw: bytes) -> str:
    """The id of a result, which stands in the beginning of ours, however much follows."""
    begins = _BEGINNING.match(raw)
    found: str = json.loads(raw)["custom_id"] if begins is None else json.loads(begins[1])
    return found


class ResultFile:
    """Results by appending, from any thread. `done` holds the custom ids that have one."""

    def __init__(self, path: Path) -> None:
        """Take up what an earlier run left; a last line that was cut short is dropped. Raises StorageError."""
        self.done: set[str] = set()
        self._path = path
        self._size = 0
        self._closed = False
        self._lock = threading.Lock()
        with storage_errors():
            path.touch()
            with path.open("rb") as file:
                for raw in file:
                    if raw.endswith(b"\n"):
                        self._size += len(raw)
                        self.done.add(_custom_id(raw))
            os.truncate(path, self._size)

    def append(self, custom_id: str, result: dict[str, Any]) -> None:
        """Add a result whole. Raises StorageError, and then nothing was added."""
        data = in_turn(in_steps(result), lambda: written(result)) + b"\n"
        with self._lock, storage_errors():
            if self._closed:
                return
            try:
                # Not buffered: what is written here is on its way to the disk even if this process is killed.
                with self._path.open("ab", buffering=0) as file:
                    write_all(file, data)
            except OSError:
                os.truncate(self._path, self._size)
                raise
            self._size += len(data)
            self.done.add(custom_id)

    def close(self) -> None:
        """Take nothing more, after an `append` that is under way in another thread."""
        with self._lock:
            self._closed = True


def write_all(file: FileIO, data: bytes) -> None:
    """Write everything. Raises OSError, and then a part may have been written."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
