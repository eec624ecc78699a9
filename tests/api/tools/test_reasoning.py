"""Reasoning parsers: where reasoning begins and ends, and that no cut of the text changes it, tools included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_outputs import BY_NAME, anonymous, cut, in_pieces, places, random_text, same_at_every_cut

from stoker_runtime.api.openai.answer import AnswerParser, Reading, plan_reading
from stoker_runtime.api.tools.dialect import Dialect
from stoker_runtime.api.tools.parsers.base import merge_deltas
from stoker_runtime.api.tools.reasoning import REASONING_PARSERS, THINK, Opened, TagReasoningParser, Tags
from stoker_runtime.api.tools.tools import FunctionSpec, ToolSpec, ToolUse

MISTRAL = Tags("[THINK]", "[/THINK]")
GRANITE = Tags("<think>", "</think>", answer=("<response>", "</response>"))
ASSUMED = Tags("<think>", "</think>", assumed=True)
USE = ToolUse("auto", tools=(ToolSpec(type="function", function=FunctionSpec(name="now")),), schemas={"now": {}})
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def parser(tags: Tags = THINK, opened: Opened = Opened.OPEN) -> Callable[[], TagReasoningParser]:
    return lambda: TagReasoningParser(tags, opened)


def assert_read(tags: Tags, opened: Opened, text: str, reasoning: str, content: str) -> None:
    """`text` is both of these, wherever it is cut."""
    found = TagReasoningParser(tags, opened).parse(text)
    assert (found.reasoning, found.content) == (reasoning, content)
    for place in range(len(text)):
        same_at_every_cut(parser(tags, opened), text, [place])


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (Opened.OPEN, "<think>\nhm\n</think>\n\nHi", "hm", "Hi"),
        (Opened.OPEN, "\n<think>hm</think>Hi\n", "hm", "Hi\n"),
        (Opened.OPEN, "<think></think>Hi", "", "Hi"),
        (Opened.OPEN, "Hi <think>no</think>", "", "Hi <think>no</think>"),
        (Opened.OPEN, "  Hi", "", "  Hi"),
        (Opened.OPEN, "<think>cut\n", "cut\n", ""),
        (Opened.OPEN, "<thi", "", "<thi"),
        (Opened.OPEN, "<think>a\n\nb</think>\n    code", "a\n\nb", "    code"),
        (Opened.YES, "hm</think>Hi", "hm", "Hi"),
        (Opened.YES, "\n  hm</think>Hi", "  hm", "Hi"),
        (Opened.YES, "<think>\nhm</think>Hi", "hm", "Hi"),
        (Opened.YES, "hm </thi", "hm </thi", ""),
        (Opened.YES, "", "", ""),
        (Opened.OVER, "\nHi </think>", "", "\nHi </think>"),
    ],
)
def test_reasoning_and_content(opened: Opened, text: str, reasoning: str, content: str) -> None:
    assert_read(THINK, opened, text, reasoning, content)


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (Opened.OPEN, "<think>hm</think>\n<response>\nHi\n</response>\n", "hm", "Hi"),
        (Opened.OPEN, "<think>hm</think><response>a\n\nb</response>c", "hm", "a\n\nbc"),
        (Opened.OPEN, "<think>hm</think>Hi <response>", "hm", "Hi <response>"),
        (Opened.OPEN, "<response>cut\n", "", "cut\n"),
        (Opened.OPEN, "<think>hm</think><respo", "hm", "<respo"),
        (Opened.OVER, "  Hi</response>", "", "  Hi</response>"),
        (Opened.YES, "hm</think>\n\n<response>Hi</resp", "hm", "Hi</resp"),
    ],
)
def test_tags_around_the_answer_are_no_part_of_it(opened: Opened, text: str, reasoning: str, content: str) -> None:
    """As Granite 3.3 writes."""
    assert_read(GRANITE, opened, text, reasoning, content)


def test_tags_of_mistral() -> None:
    found = TagReasoningParser(MISTRAL, Opened.OPEN).parse("[THINK]hm[/THINK]Hi")
    assert (found.reasoning, found.content) == ("hm", "Hi")


@pytest.mark.parametrize("tags", [THINK, MISTRAL], ids=["think", "mistral"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_text_gives_the_same_at_any_cut(tags: Tags, data: st.DataObject) -> None:
    opened = data.draw(st.sampled_from(list(Opened)))
    text = data.draw(random_text((tags.start, tags.end, tags.start[:4], tags.end[:5], "\n", " ", "word")))
    same_at_every_cut(parser(tags, opened), text, data.draw(places))
    found = TagReasoningParser(tags, opened).parse(text)
    kept = (found.reasoning + found.content).replace("\n", "").replace(tags.start, "").replace(tags.end, "")
    lost = text.replace("\n", "").replace(tags.start, "").replace(tags.end, "")
    assert kept.strip() == lost.strip()


@pytest.mark.parametrize(
    ("tags", "prompt", "continued", "opened"),
    [
        (THINK, "<|im_start|>assistant\n<think>\n", None, Opened.YES),
        (THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, Opened.OVER),
        (THINK, "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", None, Opened.OPEN),
        (ASSUMED, "<｜Assistant｜>", None, Opened.YES),
        (ASSUMED, "<｜Assistant｜></think>", None, Opened.OVER),
        (THINK, "…<think>I wonder", "<think>I wonder", Opened.YES),
        (THINK, "…</think>The answer", "<think>x</think>The answer", Opened.OVER),
        (ASSUMED, "The answer", "The answer", Opened.OVER),
    ],
)
def test_what_the_prompt_says(tags: Tags, prompt: str, continued: str | None, opened: Opened) -> None:
    assert tags.opened(prompt, continued) is opened


def plan(tools: str, reasoning: str, prompt: str = "", **more: bool) -> Reading:
    return plan_reading(Dialect(tools, reasoning, True), USE, prompt, None, more.get("show", True))


def answer(reading: Reading, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    reader = AnswerParser(reading)
    last = len(pieces) - 1
    return anonymous(merge_deltas([each for at, piece in enumerate(pieces) for each in reader.read(piece, at == last)]))


@pytest.mark.parametrize("reasoning", [name for name, tags in REASONING_PARSERS.items() if tags == THINK])
def test_reasoning_first_then_calls(reasoning: str) -> None:
    text = f"<think>\nShall I {CALL}?\n</think>\n\nSure.{CALL}"
    for pieces in ([text], list(text), cut(text, range(0, 200, 7))):
        assert answer(plan("hermes", reasoning), pieces) == ("Sure.", f"Shall I {CALL}?", [("now", "{}")])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_reasoning_and_calls_give_the_same_at_any_cut(data: st.DataObject) -> None:
    text = data.draw(random_text(("<think>", "</think>", CALL, "<tool_call>", "\n", *BY_NAME["hermes"].pieces)))
    whole = answer(plan("hermes", "qwen3"), [text])
    assert answer(plan("hermes", "qwen3"), [*text, ""]) == whole
    assert answer(plan("hermes", "qwen3"), cut(text, data.draw(places))) == whole


PAIRS = [(tools, reasoning) for tools in BY_NAME for reasoning in ("", *REASONING_PARSERS)]


@pytest.mark.parametrize(("tools", "reasoning"), PAIRS, ids=["-".join(filter(None, pair)) for pair in PAIRS])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_pair_of_parsers_gives_the_same_at_any_cut(tools: str, reasoning: str, data: st.DataObject) -> None:
    tags = REASONING_PARSERS.get(reasoning) or THINK
    spoken = st.sampled_from(("", f"{tags.start}\nHm.{tags.end}\n", "Hm." + tags.end, tags.start))
    family = BY_NAME[tools]
    text = data.draw(spoken) + data.draw(random_text((family.two, tags.start, tags.end, *family.pieces)))
    reading = plan(tools, reasoning, data.draw(st.sampled_from(("", tags.start, tags.end))))
    whole = answer(reading, [text])
    assert answer(reading, [*text, ""]) == whole
    assert answer(reading, cut(text, data.draw(places))) == whole


REQUIRED = '[{"name": "now", "parameters": {"a": [1, "]"]}}, {"name": "now", "parameters": {}}]'


@pytest.mark.parametrize("use", [replace(USE, choice="required"), replace(USE, choice="named", name="now")])
@pytest.mark.parametrize("reasoning", ["", "qwen3", "deepseek_r1"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_forced_calls_give_the_same_at_any_cut(use: ToolUse, reasoning: str, data: st.DataObject) -> None:
    reading = plan_reading(Dialect("hermes", reasoning, True), use, "", None, True)
    said = REQUIRED if use.choice == "required" else '{"a": [1, "]"]}'
    text = ("<think>Hm.</think>\n" if reasoning else "") + said[: data.draw(st.integers(0, len(said)))]
    content, thought, calls = whole = answer(reading, [text])
    assert answer(reading, [*text, ""]) == whole
    assert answer(reading, cut(text, data.draw(places))) == whole
    assert thought == ("Hm." if reasoning else "")
    if text.endswith(said):
        assert content == ""
        assert calls[0] == ("now", '{"a": [1, "]"]}')
        assert len(calls) == (2 if use.choice == "required" else 1)


def test_hidden_reasoning_is_read_and_left_out() -> None:
    assert answer(plan("hermes", "qwen3", show=False), ["<think>hm</think>Hi"]) == ("Hi", "", [])


@pytest.mark.parametrize(("tools", "reasoning"), [("openai", "openai_gptoss"), ("", "gpt_oss"), ("gpt_oss", "")])
def test_harmony_is_one_format_whichever_flag_names_it(tools: str, reasoning: str) -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + BY_NAME["openai"].two
    content, thought, calls = answer(plan(tools, reasoning), list(text))
    assert (content, thought, [name for name, _ in calls]) == ("Sure.", "hm", ["get_weather", "now"])


def test_harmony_without_tools_keeps_calls_as_content() -> None:
    reading = plan_reading(Dialect("openai", "openai_gptoss", True), ToolUse(), "", None, True)
    found = answer(reading, ["<|channel|>commentary to=functions.f<|message|>{}<|call|>"])
    assert found == ("{}", "", [])


def test_without_tools_or_reasoning_the_text_is_the_content() -> None:
    assert plan_reading(Dialect("hermes", "", True), ToolUse(), "", None, True).plain


def test_reasoning_is_not_held_back() -> None:
    reader = TagReasoningParser(THINK, Opened.YES)
    assert [len(reader.feed(character)) for character in "hm, < b"] == [1, 1, 1, 1, 0, 1, 1]
    assert anonymous(merge_deltas(in_pieces(TagReasoningParser(THINK, Opened.YES), "a < b")))[1] == "a < b"
