"""gpt-oss: the harmony format, in which an answer is a row of messages, each with a channel and maybe a recipient.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

Invariants: `analysis`, and what goes to a built-in tool, is reasoning; what goes to `functions.…` is a call; the rest
is content. The prompt has opened the first message, so the text begins inside its header.
Knows nothing of other families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from stoker_runtime.api.tools.parsers.base import NO_SCHEMAS, Schemas, ToolParser
from stoker_runtime.api.tools.parsers.json_call import EMPTY
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BOUNDS = (START, CHANNEL, *ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."


class HarmonyParser(ToolParser):
    """Reads reasoning, content and calls in one pass, messages of one kind on lines of their own.

    Without `calls`, what goes to a function is content.
    """

    SPECIAL: ClassVar = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

    def __init__(self, schemas: Schemas = NO_SCHEMAS, *, calls: bool = True) -> None:
        self._with_calls = calls
        self._reasoned = self._spoke = False
        super().__init__(schemas)

    def _run(self) -> Steps[None]:
        source = self._input
        source.mark()
        yield from source.run(SPACE)
        opening = yield from source.literal(CHANNEL, "to=", MESSAGE)
        while True:
            if opening:
                ended = yield from self._message(opening)
            else:
                # No header: what stands between messages, or a model that forgot the format.
                self._content(source.recorded())
                ended = yield from source.until(_BOUNDS, self._content)
            if ended is None:
                return
            opening = ended if ended in (START, CHANNEL) else ""
            source.mark(opening)

    def _message(self, opening: str) -> Steps[str | None]:
        """A message from the first marker of its header on; return the marker that ended it."""
        source = self._input
        parts = [opening]
        ended: str | None = MESSAGE
        if opening != MESSAGE:
            ended = yield from source.until((MESSAGE, START, *ENDS), parts.append)
        if ended != MESSAGE:
            self._content(source.recorded().removesuffix(ended or ""))
            return ended
        source.forget()
        header = "".join(parts)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        target = recipient[1] if recipient else ""
        if target.startswith(_FUNCTIONS) and target != _FUNCTIONS and self._with_calls:
            return (yield from self._call(target.removeprefix(_FUNCTIONS)))
        if (channel and channel[1] == "analysis") or (target and not target.startswith(_FUNCTIONS)):
            self._reason("\n" if self._reasoned else "")
            self._reasoned = True
            return (yield from source.until(_BOUNDS, self._reason))
        self._content("\n" if self._spoke else "")
        self._spoke = True
        return (yield from source.until(_BOUNDS, self._content))

    def _call(self, name: str) -> Steps[str | None]:
        """A call: the body is its arguments."""
        source = self._input
        self._start(name)
        yield from source.run(SPACE)
        ended = yield from source.literal(*ENDS)
        if ended or not (yield from source.peek()):
            self._arguments(EMPTY)
            return ended or None
        return (yield from source.until(_BOUNDS, self._arguments))
