"""What every parser of model output shares: deltas, the machine that makes them from text, and how they merge.

A parser turns the text of one answer into reasoning, content and tool calls. Invariants: the deltas, merged, are the
same however the text was cut into pieces; no text is lost, except markers and the blanks beside a call; what does
not read as a call up to its name and the start of its arguments is content, verbatim. From there on it is a call
whatever follows: a call that was cut short or is broken inside its arguments keeps them as the model wrote them,
and one bad call does not undo its good neighbours.
Knows nothing of HTTP, JSON bodies or tokens.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from stoker_runtime.api.tools.parsers.text_input import Steps, TextInput

Schemas = Mapping[str, Mapping[str, Any]]
NO_SCHEMAS: Schemas = {}


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the call number `index`: `id` and `name` once, in its first; `arguments` is JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Delta = TextDelta | ReasoningDelta | CallDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON text unless the model broke it off or wrote it wrong."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole answer."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(slots=True)
class _Merger:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[CallDelta, list[str]]] = field(default_factory=list)


def merge_deltas(deltas: Iterable[Delta]) -> Parsed:
    """The answer that `deltas` add up to."""
    found = _Merger()
    for delta in deltas:
        if isinstance(delta, TextDelta):
            found.content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            found.reasoning.append(delta.text)
        else:
            if delta.name:
                found.calls.append((delta, []))
            found.calls[delta.index][1].append(delta.arguments)
    calls = tuple(ToolCall(head.id, head.name, "".join(parts)) for head, parts in found.calls)
    return Parsed("".join(found.content), calls, "".join(found.reasoning))


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas with neighbours of one kind made one."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, CallDelta):
            if isinstance(last, CallDelta) and last.index == delta.index:
                found[-1] = replace(last, arguments=last.arguments + delta.arguments)
                continue
        elif last is not None and type(last) is type(delta) and not isinstance(last, CallDelta):
            found[-1] = type(delta)(last.text + delta.text)
            continue
        found.append(delta)
    return found


def speakable(text: str) -> bool:
    """Whether `text` can leave as UTF-8; JSON's escapes can spell halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class OutputParser(ABC):
    """A machine over the text of one answer. `SPECIAL` names the markers that tokenizers may hide as special tokens."""

    SPECIAL: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._input = TextInput()
        self._out: list[Delta] = []
        self._machine = self._run()
        self._running = True
        self._advance()

    def feed(self, text: str) -> list[Delta]:
        """What `text`, the next piece of the answer, makes certain."""
        self._input.push(text)
        self._advance()
        return self._drain()

    def finish(self) -> list[Delta]:
        """What is certain now that the answer has ended."""
        self._input.close()
        self._advance()
        return self._drain()

    def parse(self, whole: str) -> Parsed:
        """The answer `whole`, on a fresh parser."""
        return merge_deltas([*self.feed(whole), *self.finish()])

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Read the input to its end."""

    def _advance(self) -> None:
        if self._running:
            try:
                next(self._machine)
            except StopIteration:
                self._running = False

    def _drain(self) -> list[Delta]:
        out, self._out = self._out, []
        return joined(out)

    def _text(self, text: str) -> None:
        if text:
            self._out.append(TextDelta(text))

    def _reason(self, text: str) -> None:
        if text:
            self._out.append(ReasoningDelta(text))


class ToolParser(OutputParser):
    """A parser that finds calls. `schemas`: the parameters' JSON schema of each tool by name.

    `OWN_LINE`: a call begins on a line of its own, so the line ends before it are no content.
    """

    OWN_LINE: ClassVar[bool] = False
    ID_PREFIX: ClassVar[str] = "call_"
    ID_LENGTH: ClassVar[int] = 24

    def __init__(self, schemas: Schemas = NO_SCHEMAS) -> None:
        self._schemas = schemas
        self._calls = 0
        # Blanks since the beginning or the last call, not given out yet; None once text stands there.
        self._blank: str | None = ""
        # Line ends after text, not given out yet: a call may follow.
        self._line_ends = ""
        self._only_text = True
        super().__init__()

    @classmethod
    def openings(cls, schemas: Schemas) -> tuple[str, ...]:
        """What an answer that calls may begin with."""
        return cls.SPECIAL[:1]

    def finish(self) -> list[Delta]:
        """What is certain now that the answer has ended."""
        deltas = super().finish()
        if self._blank and self._only_text:
            deltas.append(TextDelta(self._blank))
        if self._line_ends:
            deltas.append(TextDelta(self._line_ends))
        self._blank, self._line_ends = None, ""
        return deltas

    def _content(self, text: str) -> None:
        """Give out content; blanks beside a call are dropped."""
        if self._blank is not None:
            self._blank += text
            if not self._blank or self._blank.isspace():
                return
            text, self._blank = self._blank, None
        if not self.OWN_LINE:
            self._text(text)
            return
        said = text.rstrip("\n")
        if said:
            self._text(self._line_ends + said)
            self._line_ends = ""
        self._line_ends += text[len(said) :]

    def _start(self, name: str, identity: str = "") -> None:
        """Begin a call: nothing of it can become content any more. `identity`: what the model calls it itself."""
        self._leave_text()
        self._out.append(CallDelta(self._calls, identity or self._new_id(), name))
        self._calls += 1

    def _leave_text(self) -> None:
        """Drop what was recorded and the blanks before it."""
        self._input.forget()
        self._blank, self._line_ends, self._only_text = "", "", False

    def _arguments(self, fragment: str) -> None:
        """Go on with the arguments of the last call."""
        if fragment:
            self._out.append(CallDelta(self._calls - 1, arguments=fragment))

    def _new_id(self) -> str:
        return self.ID_PREFIX + uuid.uuid4().hex[: self.ID_LENGTH]
