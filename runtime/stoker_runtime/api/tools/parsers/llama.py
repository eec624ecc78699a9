"""Llama 3: `{"name": …, "parameters": {…}}` as the whole answer, `;` between several, or after `<|python_tag|>`.

Invariants: without the tag only an answer that begins with an object is a call, so that JSON within text is text.
Knows nothing of other families.
"""

from __future__ import annotations

from typing import ClassVar

from stoker_runtime.api.tools.parsers.json_call import JsonCallParser
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

TAG = "<|python_tag|>"


class LlamaParser(JsonCallParser):
    """An object that is no call is content at its first foreign key, so JSON answers stream."""

    SPECIAL: ClassVar = (TAG,)

    def _run(self) -> Steps[None]:
        source = self._input
        self._content((yield from source.run(SPACE)))
        if (yield from source.peek()) == "{":
            source.mark()
            yield from self._sequence()
        while (yield from source.until((TAG,), self._content)):
            source.mark(TAG)
            yield from source.run(SPACE)
            yield from self._sequence()

    def _sequence(self) -> Steps[None]:
        """Calls with separators between them; what was recorded and is none becomes content."""
        source = self._input
        while (yield from self._call(bare=True)):
            yield from source.run(SPACE)
            source.mark()
            yield from source.literal(";", ",")
            yield from source.run(SPACE)
            if (yield from source.peek()) != "{":
                break
        self._content(source.recorded())
