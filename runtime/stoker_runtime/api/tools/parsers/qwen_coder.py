"""Qwen3-Coder and Qwen 3.5: `<tool_call><function=name><parameter=k>\nv\n</parameter>…</function></tool_call>`; and
Seed-OSS, whose outer tag is another.

Invariants: the one line end after the opening tag and the one before the closing tag belong to the format, not to
the value.
Knows nothing of other families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from stoker_runtime.api.tools.parsers.tagged_call import ParameterTags, TaggedCallParser
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

FUNCTION = "<function="
_NAME = re.compile(r"[^\s<>]+")
TAGS = ParameterTags("<parameter=", _NAME, ">", ("\n</parameter>", "</parameter>"), "</function>", lead="\n")


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
            if (yield from self._parameters(TAGS)):
                self._close()
                yield from source.run(SPACE)
                yield from source.literal(self.CLOSE)


class SeedParser(QwenCoderParser):
    """Seed-OSS."""

    OPEN = "<seed:tool_call>"
    CLOSE = "</seed:tool_call>"
    SPECIAL: ClassVar = (OPEN, CLOSE)
