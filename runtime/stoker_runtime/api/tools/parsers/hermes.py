"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number, anywhere.

Knows nothing of other families.
"""

from __future__ import annotations

from typing import ClassVar

from stoker_runtime.api.tools.parsers.json_call import JsonCallParser
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """A block that holds no call stays content. vLLM makes the whole answer content then; here only the block."""

    SPECIAL: ClassVar = (OPEN, CLOSE)

    def _run(self) -> Steps[None]:
        source = self._input
        while (yield from source.until((OPEN,), self._content)):
            source.mark(OPEN)
            yield from source.run(SPACE)
            if not (yield from self._call()):
                self._content(source.recorded())
                continue
            # Some models put several calls into one block.
            yield from source.run(SPACE)
            while (yield from source.peek()) == "{":
                source.mark()
                if not (yield from self._call()):
                    self._content(source.recorded())
                    break
                yield from source.run(SPACE)
            yield from source.literal(CLOSE)
