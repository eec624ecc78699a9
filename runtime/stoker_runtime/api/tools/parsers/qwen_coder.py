"""Qwen3-Coder and Qwen 3.5: `<tool_call><function=name><parameter=k>\nv\n</parameter>…</function></tool_call>`; and
Seed-OSS, whose outer tag is another.

Invariants: the one line end after the opening tag and the one before the closing tag belong to the format, not to
the value.
Knows nothing of other families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from stoker_runtime.api.tools.parsers.tagged_call import TaggedCallParser, quoted
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_ENDS = "<parameter=", ("\n</parameter>", "</parameter>")
_NAME = re.compile(r"[^\s<>]+")


class QwenCoderParser(TaggedCallParser):
    """The function's tag alone begins a call too: these models leave out the outer one now and then."""

    OPEN: ClassVar = "<tool_call>"
    CLOSE: ClassVar = "</tool_call>"
    SPECIAL: ClassVar = (OPEN, CLOSE)

    def _run(self) -> Steps[None]:
        source = self._input
        while marker := (yield from source.until((self.OPEN, FUNCTION), self._content)):
            source.mark(marker)
            if marker == self.OPEN:
                yield from source.run(SPACE)
                marker = yield from source.literal(FUNCTION)
            name = (yield from source.run(_NAME)) if marker else ""
            if not name or not (yield from source.literal(">")):
                self._content(source.recorded())
                continue
            self._open(name)
            if (yield from self._parameters()):
                self._close()
                yield from source.run(SPACE)
                yield from source.literal(self.CLOSE)

    def _parameters(self) -> Steps[bool]:
        """All arguments up to the function's end tag; False when one of them was cut short."""
        source = self._input
        while True:
            yield from source.run(SPACE)
            if (yield from source.literal(PARAMETER, FUNCTION_END)) != PARAMETER:
                return True
            key = yield from source.run(_NAME)
            if not (yield from source.literal(">")):
                self._arguments(quoted(key))
                return False
            yield from source.literal("\n")
            self._open_argument(key)
            complete = bool((yield from source.until(PARAMETER_ENDS, self._value)))
            self._close_argument(complete)
            if not complete:
                return False


class SeedParser(QwenCoderParser):
    """Seed-OSS."""

    OPEN = "<seed:tool_call>"
    CLOSE = "</seed:tool_call>"
    SPECIAL: ClassVar = (OPEN, CLOSE)
