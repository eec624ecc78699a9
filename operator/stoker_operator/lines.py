"""The lines of a log: one for each record, whatever a client or a cluster put into it.

The runtime's log does the same; the operator's image has no runtime.
Invariants: control characters are escaped; the lines of a traceback are indented.
Knows nothing of what is logged.
"""

from __future__ import annotations

import logging
from typing import Any

FORM = "%(asctime)s %(levelname)s %(name)s %(message)s"
# What ends a line, moves a terminal's cursor, or turns the direction of what follows.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_ESCAPES |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


def escaped(text: str) -> str:
    """`text` on one line, its control characters as they are written in a program."""
    return text if text.isprintable() else text.translate(_ESCAPES)


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
