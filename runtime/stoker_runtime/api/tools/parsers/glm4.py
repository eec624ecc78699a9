"""GLM-4, of 2024 and 0414, and GLM-Z1: the name of a function on a line of its own, then its arguments.

    NAME\\n{…}<|assistant|>NAME\\n{…}

Invariants: only a name that was declared, at the beginning of a line and followed by a line that begins an object of
JSON, is a call, since nothing else tells one from words.
Knows nothing of other families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from stoker_runtime.api.tools.parsers.base import Schemas
from stoker_runtime.api.tools.parsers.json_call import JsonCallParser
from stoker_runtime.api.tools.parsers.text_input import NEWLINES, SPACE, Steps

TURN = "<|assistant|>"
_BLANKS = re.compile(r"[ \t]+")


class Glm4Parser(JsonCallParser):
    """`<|assistant|>` begins another turn of the model's own; before a call and after one it is no content."""

    OWN_LINE = True
    SPECIAL: ClassVar = (TURN,)

    @classmethod
    def openings(cls, schemas: Schemas) -> tuple[str, ...]:
        """What an answer that calls may begin with."""
        return tuple(f"{name}\n{{" for name in schemas)

    def _run(self) -> Steps[None]:
        source = self._input
        source.mark()
        yield from source.run(SPACE)
        while True:
            while (yield from self._one()):
                yield from source.run(SPACE)
                yield from source.literal(TURN)
                yield from source.run(SPACE)
                source.mark()
            text = source.recorded()
            self._content(text)
            if text.endswith("\n"):
                source.mark()
                continue
            begun = yield from source.until(("\n", TURN), self._content)
            if begun is None:
                return
            source.mark(begun)
            yield from source.run(SPACE if begun == TURN else NEWLINES)

    def _one(self) -> Steps[bool]:
        """Read a call at the beginning of a line. False: none was begun, and what was taken stands in the record."""
        source = self._input
        name = (yield from source.literal(*self._schemas)) if self._schemas else ""
        if not name:
            return False
        yield from source.run(_BLANKS)
        if not (yield from source.run(NEWLINES)) or not (yield from source.literal("{")):
            return False
        start = "{" + (yield from source.run(SPACE))
        if (yield from source.peek()) not in ('"', "}"):
            return False
        self._start(name)
        self._arguments(start)
        yield from self._json_nested(self._arguments, 1)
        return True
