"""One log for both processes: lines for people or JSON objects for machines, on standard error.

Invariants: each record has a time, a level, a logger and a message, and a request id where there is one; nothing
is logged twice.
Knows nothing of what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time

FIELDS = ("request_id",)


class LineFormatter(logging.Formatter):
    """`12:34:56.789 INFO server: message`, with the process's name before the logger's where there are several."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = f"[{process}] " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        """One line, with the traceback below it if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("stoker_runtime.")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {self._process}{name}: {record.getMessage()}"
        for field in FIELDS:
            if value := getattr(record, field, None):
                line += f" {field}={value}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
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
        return json.dumps(entry, ensure_ascii=False)


def set_up(level: str, as_json: bool = False, process: str = "") -> None:
    """Make this the log of the process; `process` names it where a server has several that write to one log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if as_json else LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn", "uvicorn.error", "asyncio", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
