"""DeepSeek: calls between special tokens, with `function`, the name and a fenced block (V2, V3, R1) or without (V3.1).

    V3     <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{…}\n```<｜tool▁call▁end｜>
    V3.1   <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>

Invariants: which of the two it is shows in what follows the separator, so one parser reads both.
Knows nothing of other families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from stoker_runtime.api.tools.parsers.json_call import JsonCallParser
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

CALLS_OPEN, CALLS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = re.compile(r"[\w.:/-]+")


class DeepSeekParser(JsonCallParser):
    """What stands between the tokens and is no call stays content, tokens included."""

    SPECIAL: ClassVar = (CALLS_OPEN, CALLS_CLOSE, OPEN, CLOSE, SEPARATOR)

    def _run(self) -> Steps[None]:
        source = self._input
        while marker := (yield from source.until((CALLS_OPEN, OPEN), self._content)):
            source.mark(marker)
            if marker == CALLS_OPEN:
                yield from source.run(SPACE)
                marker = yield from source.literal(OPEN)
            while marker == OPEN and (yield from self._one()):
                yield from source.run(SPACE)
                yield from source.literal("```")
                yield from source.run(SPACE)
                yield from source.literal(CLOSE)
                yield from source.run(SPACE)
                source.mark()
                marker = yield from source.literal(OPEN, CALLS_CLOSE)
            if marker == CALLS_CLOSE:
                source.forget()
            self._content(source.recorded())

    def _one(self) -> Steps[bool]:
        source = self._input
        yield from source.run(SPACE)
        name = yield from source.run(_NAME)
        yield from source.run(SPACE)
        if not name or not (yield from source.literal(SEPARATOR)):
            return False
        yield from source.run(SPACE)
        if (yield from source.peek()) != "{":
            name = yield from source.run(_NAME)
            yield from source.run(SPACE)
            yield from source.literal("```json", "```")
            yield from source.run(SPACE)
        if not name or (yield from source.peek()) != "{":
            return False
        self._start(name)
        yield from self._json_value(self._arguments)
        return True
