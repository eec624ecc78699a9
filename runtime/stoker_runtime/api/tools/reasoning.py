"""Reasoning parsers: tell what a model thinks from what it says.

Invariants: as for tool parsers, pieces of any size give the same answer; what is not reasoning passes on verbatim,
markers of calls included, so that a tool parser can read it; the line ends on either side of the tags are dropped.
An answer that ends before its closing tag is all reasoning, as in vLLM.
Knows nothing of tools or HTTP. gpt-oss has reasoning, content and calls in one format: see parsers/harmony.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from stoker_runtime.api.tools.parsers.base import OutputParser
from stoker_runtime.api.tools.parsers.text_input import NEWLINES, SPACE, Steps


class Opened(Enum):
    """What the prompt says of the reasoning: whether it has begun, is over, or is up to the model."""

    YES = "yes"
    OVER = "over"
    OPEN = "up to the model"


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a family. `assumed`: its models leave out the opening tag, so an answer begins as reasoning.

    `answer`: what stands around the answer behind the reasoning, which is no part of it.
    """

    start: str
    end: str
    assumed: bool = False
    answer: tuple[str, str] | None = None

    def opened(self, prompt: str, continued: str | None = None) -> Opened:
        """How things stand after `prompt`, whose last message is the `continued` one if the answer goes on with it."""
        if continued is not None:
            start, end = continued.rfind(self.start), continued.rfind(self.end)
            if start < 0 and end < 0:
                return Opened.OVER
            return Opened.YES if start > end else Opened.OVER
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return Opened.YES
        if tail.endswith(self.end):
            return Opened.OVER
        return Opened.YES if self.assumed else Opened.OPEN


class TagReasoningParser(OutputParser):
    """Reasoning between tags at the beginning of an answer."""

    SPECIAL: ClassVar = (
        "<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>",
        "<|START_THINKING|>", "<|END_THINKING|>", "<|thought_start|>", "<|thought_end|>", "<response>", "</response>",
    )  # fmt: skip

    def __init__(self, tags: Tags, opened: Opened) -> None:
        self._tags = tags
        self._opened = opened
        super().__init__()

    def _run(self) -> Steps[None]:
        source = self._input
        if self._opened is not Opened.OVER:
            source.mark()
            yield from source.run(SPACE)
            begun = yield from source.literal(self._tags.start)
            if begun or self._opened is Opened.YES:
                # An indent is part of the reasoning, line ends before it are not.
                blank = source.recorded()
                yield from self._within(self._tags.end, self._reason, "" if begun else blank.lstrip("\n"))
            self._text(source.recorded())
        if self._tags.answer is not None:
            begin, end = self._tags.answer
            source.mark()
            yield from source.run(SPACE)
            if (yield from source.literal(begin)):
                source.recorded()
                yield from self._within(end, self._text)
            else:
                self._text(source.recorded())
        yield from source.rest(self._text)

    def _within(self, end: str, give: Callable[[str], None], begun: str = "") -> Steps[None]:
        """Give out what stands before `end`, without the line ends on either side, which wait for what follows."""
        newlines = ""

        def pass_on(text: str) -> None:
            nonlocal newlines
            text = newlines + text
            said = text.rstrip("\n")
            newlines = text[len(said) :]
            give(said)

        source = self._input
        pass_on(begun)
        yield from source.run(NEWLINES)
        if not (yield from source.until((end,), pass_on)):
            give(newlines)
        yield from source.run(NEWLINES)


THINK = Tags("<think>", "</think>")
HARMONY = "openai_gptoss"
# gpt-oss: the whole answer goes to the harmony parser.
HARMONY_NAMES = (HARMONY, "gpt_oss")
REASONING_PARSERS: Mapping[str, Tags | None] = {
    "deepseek_r1": Tags("<think>", "</think>", assumed=True),
    "deepseek_v3": THINK,
    "qwen3": THINK,
    "glm45": THINK,
    "minimax_m2": THINK,
    "mistral": Tags("[THINK]", "[/THINK]"),
    "granite": Tags("Here is my thought process:", "Here is my response:"),
    "granite3_3": Tags("<think>", "</think>", answer=("<response>", "</response>")),
    "cohere": Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    "minicpm": Tags("<|thought_start|>", "<|thought_end|>"),
    "seed_oss": Tags("<seed:think>", "</seed:think>"),
    "exaone_deep": Tags("<thought>", "</thought>"),
    **dict.fromkeys(HARMONY_NAMES),
}
