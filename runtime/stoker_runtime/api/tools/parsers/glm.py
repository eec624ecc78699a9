"""GLM 4.5 and later: `<tool_call>name`, then `<arg_key>k</arg_key><arg_value>v</arg_value>` each, then `</tool_call>`.

Knows nothing of other families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from stoker_runtime.api.tools.parsers.tagged_call import TaggedCallParser, quoted
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[\w.:/-]+")


class GlmParser(TaggedCallParser):
    """A block whose name is not followed by an argument or the end stays content, as in vLLM."""

    SPECIAL: ClassVar = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    def _run(self) -> Steps[None]:
        source = self._input
        while (yield from source.until((OPEN,), self._content)):
            source.mark(OPEN)
            yield from source.run(SPACE)
            name = yield from source.run(_NAME)
            yield from source.run(SPACE)
            marker = (yield from source.literal(KEY, CLOSE)) if name else ""
            if not marker:
                self._content(source.recorded())
                continue
            self._open(name)
            whole = True
            while marker == KEY and whole:
                whole = yield from self._argument()
                yield from source.run(SPACE)
                marker = (yield from source.literal(KEY, CLOSE)) if whole else ""
            if whole:
                self._close()

    def _argument(self) -> Steps[bool]:
        """One argument after its `<arg_key>`; False when the text ended inside it."""
        source = self._input
        parts: list[str] = []
        ended = yield from source.until((KEY_END,), parts.append)
        key = "".join(parts).strip()
        yield from source.run(SPACE)
        if not ended or not (yield from source.literal(VALUE)):
            self._arguments(quoted(key))
            return False
        self._open_argument(key)
        complete = bool((yield from source.until((VALUE_END,), self._value)))
        self._close_argument(complete)
        return complete
