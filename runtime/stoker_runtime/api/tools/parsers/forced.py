"""Calls that a request forces: the grammar lets the model write nothing but JSON, with no markers around it.

Invariants: the text follows the schema of `tool_choice_schema` in forced_calls.py; it may be cut short, but never
be other text.
Knows nothing of grammars.
"""

from __future__ import annotations

from stoker_runtime.api.tools.parsers.base import ToolParser
from stoker_runtime.api.tools.parsers.json_call import JsonCallParser
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps


class NamedCallParser(ToolParser):
    """The answer is the arguments of the one tool `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def _run(self) -> Steps[None]:
        yield from self._input.run(SPACE)
        if (yield from self._input.peek()):
            self._start(self._name)
            yield from self._input.rest(self._arguments)


class RequiredCallsParser(JsonCallParser):
    """The answer is a list of calls, `[{"name": …, "parameters": {…}}, …]`."""

    def _run(self) -> Steps[None]:
        source = self._input
        source.mark()
        yield from source.run(SPACE)
        separator = yield from source.literal("[")
        while separator and separator != "]":
            yield from source.run(SPACE)
            if not (yield from self._call()):
                break
            yield from source.run(SPACE)
            source.mark()
            separator = yield from source.literal(",", "]")
            if separator == "]":
                source.forget()
        self._content(source.recorded())
        yield from source.rest(self._content)
