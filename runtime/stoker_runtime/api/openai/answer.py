"""The answer of a chat model taken apart: reasoning first, then content and tool calls, and the JSON of each.

Invariants: a streamed answer, put together, equals the whole one; `reasoning` and `reasoning_content` always agree.
Knows nothing of engines or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker_runtime.api.tools.dialect import Dialect
from stoker_runtime.api.tools.leads import harmony_lead, text_lead
from stoker_runtime.api.tools.parsers import TOOL_PARSERS
from stoker_runtime.api.tools.parsers.base import (
    CallDelta,
    Delta,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    merge_deltas,
)
from stoker_runtime.api.tools.parsers.forced import NamedCallParser, RequiredCallsParser
from stoker_runtime.api.tools.parsers.harmony import HarmonyParser
from stoker_runtime.api.tools.reasoning import HARMONY_NAMES, REASONING_PARSERS, Opened, TagReasoningParser, Tags
from stoker_runtime.api.tools.tools import ToolUse
from stoker_runtime.text.tokenizer import Tokenizer

MakeParser = Callable[[], OutputParser]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read: a parser each for reasoning and for calls, or None.

    `tags` and `opened` say where reasoning stands when the answer begins. `named`: the one call that the answer is was
    the client's choice, so that it is no reason of its own to end. `harmony`: one parser reads everything.
    """

    reasoning: MakeParser | None = None
    calls: MakeParser | None = None
    call_markers: tuple[str, ...] = ()
    call_openings: tuple[str, ...] = ()
    parallel: bool = True
    show_reasoning: bool = True
    tags: Tags | None = None
    opened: Opened = Opened.OVER
    named: bool = False
    harmony: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens."""
        if self.harmony:
            return HarmonyParser.SPECIAL
        return self.call_markers if self.tags is None else (*self.call_markers, self.tags.start, self.tags.end)

    @property
    def plain(self) -> bool:
        """Whether the text is the content as it stands."""
        return self.reasoning is None and self.calls is None

    def visible(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens that the parsers must see."""
        found = (tokenizer.token_to_id(marker) for marker in self.markers)
        return frozenset(at for at in found if at is not None)

    def lead(self, tokenizer: Tokenizer, *, calls: bool = False) -> str:
        """What may come around an answer that is constrained, as a grammar; "" for nothing.

        With `calls` the model may call instead, where its family's calls begin as no answer does.
        """
        if self.harmony:
            return harmony_lead(calls=calls)
        openings = self.call_openings if calls else ()
        return text_lead(self.tags, self.opened, tokenizer, openings, self.call_markers)


def plan_reading(dialect: Dialect, use: ToolUse, prompt: str, continued: str | None, show_reasoning: bool) -> Reading:
    """How to read what follows `prompt`; `continued`: the text of the last message where the answer goes on with it."""
    named = use.choice == "named"
    if TOOL_PARSERS.get(dialect.tool_parser) is HarmonyParser or dialect.reasoning_parser in HARMONY_NAMES:
        return Reading(
            lambda: HarmonyParser(calls=use.choice != "none"),
            parallel=use.parallel,
            show_reasoning=show_reasoning,
            named=named,
            harmony=True,
        )
    calls, markers, openings = _calls_parser(dialect, use)
    tags = REASONING_PARSERS.get(dialect.reasoning_parser)
    if tags is None:
        return Reading(None, calls, markers, openings, use.parallel, named=named)
    opened = tags.opened(prompt, continued)
    return Reading(
        lambda: TagReasoningParser(tags, opened),
        calls,
        markers,
        openings,
        use.parallel,
        show_reasoning,
        tags,
        opened,
        named,
    )


def _calls_parser(dialect: Dialect, use: ToolUse) -> tuple[MakeParser | None, tuple[str, ...], tuple[str, ...]]:
    """The parser of calls, the special tokens that it must see, and what calls begin with."""
    if use.choice == "named":
        return lambda: NamedCallParser(use.name), (), ()
    if use.choice == "required":
        return RequiredCallsParser, (), ()
    parser = TOOL_PARSERS.get(dialect.tool_parser)
    if parser is None or use.choice != "auto":
        return None, (), ()
    return lambda: parser(use.schemas), parser.SPECIAL, parser.openings(use.schemas)


class AnswerParser:
    """The parser of one choice. `called` tells whether the model decided to call."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._reasoning = reading.reasoning() if reading.reasoning else None
        self._calls = reading.calls() if reading.calls else None
        self.called = False

    def read(self, text: str, last: bool) -> list[Delta]:
        """What the next piece of text makes certain; `last` when none follows."""
        deltas = [TextDelta(text)] if self._reasoning is None else self._split(self._reasoning, text, last)
        if self._calls is not None:
            calls, deltas_in = self._calls, deltas
            deltas = [found for delta in deltas_in for found in _through(calls, delta)]
            deltas += calls.finish() if last else []
        return [delta for delta in deltas if self._keep(delta)]

    def _split(self, parser: OutputParser, text: str, last: bool) -> list[Delta]:
        return parser.feed(text) + (parser.finish() if last else [])

    def _keep(self, delta: Delta) -> bool:
        if isinstance(delta, CallDelta):
            self.called = not self._reading.named
            return self._reading.parallel or delta.index == 0
        if isinstance(delta, ReasoningDelta):
            return self._reading.show_reasoning
        return bool(delta.text)


def _through(parser: OutputParser, delta: Delta) -> Sequence[Delta]:
    return parser.feed(delta.text) if isinstance(delta, TextDelta) else (delta,)


def whole_message(reading: Reading, text: str) -> tuple[dict[str, Any], bool]:
    """The message of a whole answer, and whether it calls."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reading.plain:
        return message, False
    parser = AnswerParser(reading)
    found = merge_deltas(parser.read(text, last=True))
    message["content"] = found.content or (None if found.tool_calls or found.reasoning else "")
    if reading.reasoning is not None and reading.show_reasoning:
        message |= _reasoning(found.reasoning or None)
    if found.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in found.tool_calls
        ]
    return message, parser.called


def delta_message(deltas: Iterable[Delta]) -> dict[str, Any]:
    """What the deltas of one step say, as the delta of one event."""
    found = list(deltas)
    message: dict[str, Any] = {}
    if content := "".join([delta.text for delta in found if isinstance(delta, TextDelta)]):
        message["content"] = content
    if reasoning := "".join([delta.text for delta in found if isinstance(delta, ReasoningDelta)]):
        message |= _reasoning(reasoning)
    calls: dict[int, dict[str, Any]] = {}
    for delta in found:
        if isinstance(delta, CallDelta):
            _add_call(calls, delta)
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def _add_call(calls: dict[int, dict[str, Any]], delta: CallDelta) -> None:
    call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
    if delta.name:
        call |= {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
    call["function"]["arguments"] += delta.arguments


def _reasoning(text: str | None) -> dict[str, Any]:
    return {"reasoning": text, "reasoning_content": text}
