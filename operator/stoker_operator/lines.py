"""The lines of a log: one for each record, whatever a client or a cluster put into it.

The runtime's log does the same; the operator's image has no runtime.
Invariants: control characters are escaped; the lines of a traceback are indented.
Knows nothing of what is logged.
"""

from __future__ import annotations

import logging
from typing import Any

FORM = "%(asctime)s %(levelname)s %(name)s %(message)s"
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escaped(text: str) -> str:
    """`text` on one line: what ends one, moves a cursor, turns a direction or cannot be seen as programs write it."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(character: str) -> str:
    code = ord(character)
    width = "x02" if code < 0x100 else "u04" if code < 0x10000 else "U08"
    return _ESCAPES.get(character) or f"\\{width[0]}{code:{width[1:]}x}"


class LineFormatter(logging.Formatter):
    """Time, level, logger and message on one line, a traceback below it."""

    def __init__(self) -> None:
        super().__init__(FORM)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line itself."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """The traceback, whose lines are indented so that none of them looks like a record."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """The stack, as a traceback."""
        return _indented(stack_info)


def _indented(text: str) -> str:
    return "\n".join(f"    {escaped(line)}" for line in text.split("\n"))
