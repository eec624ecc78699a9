"""DeepSeek: calls between special tokens, with `function`, the name and a fenced block (V2, V3, R1) or without (V3.1);
and Kimi K2, which is built alike and has other tokens.

    V3     <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{…}\n```<｜tool▁call▁end｜>
    V3.1   <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
    Kimi   <|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{…}<|tool_call_end|>

Invariants: which of DeepSeek's two it is shows in what follows the separator, so one parser reads both.
Knows nothing of other families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from stoker_runtime.api.tools.parsers.json_call import JsonCallParser
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

_NAME = re.compile(r"[\w.:/-]+")
_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class DeepSeekParser(JsonCallParser):
    """What stands between the tokens and is no call stays content, tokens included."""

    CALLS_OPEN, CALLS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    OPEN, CLOSE, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    SPECIAL: ClassVar = (CALLS_OPEN, CALLS_CLOSE, OPEN, CLOSE, SEPARATOR)

    def _run(self) -> Steps[None]:
        source = self._input
        while marker := (yield from source.until((self.CALLS_OPEN, self.OPEN), self._content)):
            source.mark(marker)
            if marker == self.CALLS_OPEN:
                yield from source.run(SPACE)
                marker = yield from source.literal(self.OPEN)
            while marker == self.OPEN and (yield from self._one()):
                yield from source.run(SPACE)
                yield from source.literal("```")
                yield from source.run(SPACE)
                yield from source.literal(self.CLOSE)
                yield from source.run(SPACE)
                source.mark()
                marker = yield from source.literal(self.OPEN, self.CALLS_CLOSE)
            if marker == self.CALLS_CLOSE:
                source.forget()
            self._content(source.recorded())

    def _one(self) -> Steps[bool]:
        source = self._input
        yield from source.run(SPACE)
        name = yield from source.run(_NAME)
        yield from source.run(SPACE)
        if not name or not (yield from source.literal(self.SEPARATOR)):
            return False
        yield from source.run(SPACE)
        if (yield from source.peek()) != "{":
            name = yield from source.run(_NAME)
            yield from source.run(SPACE)
            yield from source.literal("```json", "```")
            yield from source.run(SPACE)
        if not name or (yield from source.peek()) != "{":
            return False
        self._begin(name)
        yield from self._json_value(self._arguments)
        return True

    def _begin(self, name: str) -> None:
        self._start(name)


class KimiParser(DeepSeekParser):
    """Kimi K2. A call has the id that the model gives it, by which its template names the result."""

    CALLS_OPEN, CALLS_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    OPEN, CLOSE, SEPARATOR = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
    SPECIAL: ClassVar = (CALLS_OPEN, CALLS_CLOSE, OPEN, CLOSE, SEPARATOR)

    def _begin(self, name: str) -> None:
        found = _NUMBERED.fullmatch(name)
        self._start(found[1] if found else name, name)
