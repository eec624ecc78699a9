"""Calls as one JSON list behind a marker: Granite 3, Phi-4-mini, Nemotron Nano, Command R7B and InternLM, each with its
own; and Command R and R+, whose marker is a word.

    granite         <|tool_call|>[{"name": …, "arguments": {…}}, …]
    phi4_mini_json  <|tool_call|>[…]<|/tool_call|>
    nemotron_json   <TOOLCALL>[…]</TOOLCALL>
    cohere          <|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>
    command_r       Action: ```json [{"tool_name": …, "parameters": {…}}, …] ```
    internlm        <|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>

Invariants: one object without a list is a call, too; what the list holds and is no call becomes content.
Knows nothing of other families.
"""

from __future__ import annotations

from typing import ClassVar

from stoker_runtime.api.tools.parsers.base import Schemas
from stoker_runtime.api.tools.parsers.json_call import JsonCallParser
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps


class ListedParser(JsonCallParser):
    """`OPEN` begins the list, before which one of `FENCES` may stand; `CLOSE`, where a family has one, follows it."""

    OPEN: ClassVar[str]
    FENCES: ClassVar[tuple[str, ...]] = ()
    CLOSE: ClassVar[str] = ""

    def _run(self) -> Steps[None]:
        source = self._input
        while (yield from source.until((self.OPEN,), self._content)):
            source.mark(self.OPEN)
            yield from source.run(SPACE)
            if self.FENCES:
                yield from source.literal(*self.FENCES)
                yield from source.run(SPACE)
            whole = yield from self._list()
            self._content(source.recorded())
            if whole and self.CLOSE:
                yield from source.run(SPACE)
                yield from source.literal(self.CLOSE)

    def _list(self) -> Steps[bool]:
        """The calls of a list, or the one beside none; False where something else comes."""
        source = self._input
        listed = bool((yield from source.literal("[")))
        while True:
            yield from source.run(SPACE)
            if not (yield from self._call()):
                return False
            if not listed:
                return True
            yield from source.run(SPACE)
            source.mark()
            end = yield from source.literal("]", ",")
            if end == ",":
                continue
            source.forget()
            return end == "]"


class GraniteParser(ListedParser):
    """Granite 3.0 to 3.3."""

    OPEN = "<|tool_call|>"
    SPECIAL: ClassVar = (OPEN,)


class Phi4MiniParser(ListedParser):
    """Phi-4-mini."""

    OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"
    SPECIAL: ClassVar = (OPEN, CLOSE)


class NemotronParser(ListedParser):
    """Nemotron Nano v2, and Llama-3.1-Nemotron Nano."""

    OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"
    SPECIAL: ClassVar = (OPEN, CLOSE)


class CohereParser(ListedParser):
    """Command R7B and Command A."""

    OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
    SPECIAL: ClassVar = (OPEN, CLOSE)
    NAME_KEY = "tool_name"
    OTHER_KEYS = frozenset({"tool_call_id"})


class CommandRParser(ListedParser):
    """Command R and R+, which choose `directly-answer` where no tool is of use: no call, unless a tool is called so."""

    OWN_LINE = True
    OPEN, FENCES, CLOSE = "Action:", ("```json", "```"), "```"
    NAME_KEY = "tool_name"
    NO_TOOL: ClassVar = ("directly-answer", "directly_answer")
    _dropped = False

    @classmethod
    def openings(cls, schemas: Schemas) -> tuple[str, ...]:
        """What an answer that calls may begin with."""
        return (cls.OPEN,)

    def _start(self, name: str, identity: str = "") -> None:
        self._dropped = name in self.NO_TOOL and name not in self._schemas
        if self._dropped:
            self._leave_text()
        else:
            super()._start(name, identity)

    def _arguments(self, fragment: str) -> None:
        if not self._dropped:
            super()._arguments(fragment)


class InternLMParser(ListedParser):
    """InternLM 2, 2.5 and 3, which call one at a time."""

    OPEN, CLOSE = "<|action_start|><|plugin|>", "<|action_end|>"
    SPECIAL: ClassVar = ("<|action_start|>", "<|plugin|>", CLOSE)
