"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and since v11 `[TOOL_CALLS]name[ARGS]{…}` for each call.

Knows nothing of other families.
"""

from __future__ import annotations

import re
import secrets
import string
from typing import ClassVar

from stoker_runtime.api.tools.parsers.json_call import JsonCallParser
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

MARKER, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.:/-]+")
_ID = string.ascii_letters + string.digits
ID_LENGTH = 9


class MistralParser(JsonCallParser):
    """Ids have nine letters and digits, because Mistral's templates refuse any other when a call comes back."""

    SPECIAL: ClassVar = (MARKER, ARGUMENTS, CALL_ID)

    def _run(self) -> Steps[None]:
        source = self._input
        while (yield from source.until((MARKER,), self._content)):
            source.mark(MARKER)
            yield from source.run(SPACE)
            first = yield from source.peek()
            if first == "[":
                yield from self._array()
            elif first == "{":
                yield from self._call()
            else:
                yield from self._named()
            self._content(source.recorded())

    def _array(self) -> Steps[None]:
        source = self._input
        source.take()
        while True:
            yield from source.run(SPACE)
            if not (yield from self._call()):
                return
            yield from source.run(SPACE)
            source.mark()
            if (yield from source.literal("]", ",")) != ",":
                source.forget()
                return

    def _named(self) -> Steps[None]:
        """`name[ARGS]{…}`, with or without an id or the marker between name and object."""
        source = self._input
        name = yield from source.run(_NAME)
        marker = yield from source.literal(CALL_ID, ARGUMENTS)
        if marker == CALL_ID:
            yield from source.run(_NAME)
            yield from source.literal(ARGUMENTS)
        yield from source.run(SPACE)
        if name and (yield from source.peek()) == "{":
            self._start(name)
            yield from self._json_value(self._arguments)

    def _new_id(self) -> str:
        return "".join(secrets.choice(_ID) for _ in range(ID_LENGTH))
