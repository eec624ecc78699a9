"""MiniMax-M2: `<minimax:tool_call>`, then `<invoke name="f"><parameter name="k">v</parameter>…</invoke>` for each call,
then `</minimax:tool_call>`.

Invariants: a value is all that stands between its tags.
Knows nothing of other families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from stoker_runtime.api.tools.parsers.tagged_call import ParameterTags, TaggedCallParser
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, NAMED = '<invoke name="', '">'
_NAME = re.compile(r'[^\s<>"]+')
TAGS = ParameterTags('<parameter name="', _NAME, NAMED, ("</parameter>",), "</invoke>")


class MinimaxParser(TaggedCallParser):
    """A block that holds no call stays content."""

    SPECIAL: ClassVar = (OPEN, CLOSE)

    def _run(self) -> Steps[None]:
        source = self._input
        while (yield from source.until((OPEN,), self._content)):
            source.mark(OPEN)
            called = False
            while name := (yield from self._invoked()):
                called = True
                self._open(name)
                if (yield from self._parameters(TAGS)):
                    self._close()
            if not called:
                self._content(source.recorded())

    def _invoked(self) -> Steps[str]:
        """The name of the next call of a block; "" at its end, or where something else stands."""
        source = self._input
        yield from source.run(SPACE)
        if (yield from source.literal(INVOKE, CLOSE)) != INVOKE:
            return ""
        name = yield from source.run(_NAME)
        return name if (yield from source.literal(NAMED)) else ""
