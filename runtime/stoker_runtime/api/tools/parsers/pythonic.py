"""Pythonic calls: `[f(a=1), g(b="x")]` as the whole answer, or between the markers of Llama 4 and LFM2; a call a line
between those of OLMo 3, and in a block of code between those of MiniCPM 3 and 4.

Invariants: a call is given out when its parenthesis closes and every argument is a literal with a name, else it and
the rest of the list are content.
Knows nothing of other families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from stoker_runtime.api.tools.parsers.base import ToolParser
from stoker_runtime.api.tools.parsers.literals import keywords_json
from stoker_runtime.api.tools.parsers.text_input import SPACE, Sink, Steps

OPEN = ("<|python_start|>", "<|tool_call_start|>", "<function_calls>")
CLOSE = ("<|python_end|>", "<|tool_call_end|>", "</function_calls>")
FENCE, FENCE_END = "```python", "```"
_NAME = re.compile(r"[\w.]+")
_PLAIN = re.compile(r"[^\"'()\[\]{}]+")
_IN_SINGLE, _IN_DOUBLE = re.compile(r"[^'\\]+"), re.compile(r'[^"\\]+')


class PythonicParser(ToolParser):
    """vLLM makes the whole answer content when one call is bad; here the calls before it stand."""

    SPECIAL: ClassVar = (*OPEN, *CLOSE)

    def _run(self) -> Steps[None]:
        source = self._input
        self._content((yield from source.run(SPACE)))
        source.mark()
        yield from self._list()
        self._content(source.recorded())
        while marker := (yield from source.until(OPEN, self._content)):
            source.mark(marker)
            yield from source.run(SPACE)
            fenced = yield from source.literal(FENCE)
            yield from source.run(SPACE)
            yield from self._list() if (yield from source.peek()) == "[" else self._lines()
            self._content(source.recorded())
            yield from source.run(SPACE)
            if fenced:
                yield from source.literal(FENCE_END)
                yield from source.run(SPACE)
            yield from source.literal(*CLOSE)

    def _lines(self) -> Steps[None]:
        """Calls one after the other; what turns out to be none stands in the record."""
        source = self._input
        while (yield from self._call()):
            yield from source.run(SPACE)
            source.mark()

    def _list(self) -> Steps[None]:
        """The calls of a list; what turns out to be none stands in the record."""
        source = self._input
        if not (yield from source.literal("[")):
            return
        while True:
            yield from source.run(SPACE)
            if not (yield from self._call()):
                return
            yield from source.run(SPACE)
            source.mark()
            separator = yield from source.literal(",", "]")
            if separator == ",":
                yield from source.run(SPACE)
                separator = yield from source.literal("]")
            if separator == "]":
                source.forget()
                return
            if (yield from source.peek()) == "":
                return

    def _call(self) -> Steps[bool]:
        source = self._input
        name = yield from source.run(_NAME)
        if not name or name[0].isdigit() or (yield from source.peek()) != "(":
            return False
        parts: list[str] = []
        closed = yield from self._parenthesis(parts.append)
        arguments = keywords_json("".join(parts)) if closed else None
        if arguments is None:
            return False
        self._start(name)
        self._arguments(arguments)
        return True

    def _parenthesis(self, sink: Sink) -> Steps[bool]:
        """Pass on a parenthesis and all in it; False when the text ends first."""
        source, depth = self._input, 0
        while True:
            yield from source.flow(_PLAIN, sink)
            character = yield from source.peek()
            if not character:
                return False
            sink(source.take())
            if character in "'\"":
                yield from self._string(character, sink)
                continue
            depth += 1 if character in "([{" else -1
            if not depth:
                return True

    def _string(self, quote: str, sink: Sink) -> Steps[None]:
        """Pass on the rest of a string."""
        source = self._input
        while True:
            yield from source.flow(_IN_SINGLE if quote == "'" else _IN_DOUBLE, sink)
            character = yield from source.peek()
            if not character:
                return
            sink(source.take())
            if character == quote:
                return
            if (yield from source.peek()):
                sink(source.take())
