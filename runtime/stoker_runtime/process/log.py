"""One log for both processes: lines for people or JSON objects for machines, on standard error.

Invariants: each record has a time with its date, a level, a logger and a message, and a request id where there is
one; nothing is logged twice. A record is one line, whatever a client put into it: control characters are escaped, and
the lines of a traceback are indented.
Knows nothing of what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time

FIELDS = ("request_id",)
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escaped(text: str) -> str:
    """`text` on one line: what ends one, moves a cursor, turns a direction or cannot be seen as programs write it."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(character: str) -> str:
    code = ord(character)
    width = "x02" if code < 0x100 else "u04" if code < 0x10000 else "U08"
    return _ESCAPES.get(character) or f"\\{width[0]}{code:{width[1:]}x}"


def _escaped_json(text: str) -> str:
    """A JSON text in which nothing is but what can be seen."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


class LineFormatter(logging.Formatter):
    """`2026-01-31 12:34:56.789 INFO server: message`; the process before the logger where there are several."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = f"[{process}] " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        """One line, with the traceback below it if there is one."""
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("stoker_runtime.")
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname} {self._process}{name}: {escaped(record.getMessage())}"
        )
        for field in FIELDS:
            if value := getattr(record, field, None):
                line += f" {field}={escaped(str(value))}"
        if record.exc_info:
            line += "".join(f"\n    {escaped(each)}" for each in self.formatException(record.exc_info).split("\n"))
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for field in FIELDS:
            if value := getattr(record, field, None):
                entry[field] = value
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return _escaped_json(json.dumps(entry, ensure_ascii=False))


def set_up(level: str, as_json: bool = False, process: str = "") -> None:
    """Make this the log of the process; `process` names it where a server has several that write to one log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if as_json else LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn", "uvicorn.error", "asyncio", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
