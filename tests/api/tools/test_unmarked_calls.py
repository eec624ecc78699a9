"""GLM-4's calls and Command R's, which begin with words: random tools, arguments and texts around them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_outputs import anonymous, cut, in_pieces, places

from stoker_runtime.api.tools.parsers import TOOL_PARSERS
from stoker_runtime.api.tools.parsers.base import merge_deltas

TURN = "<|assistant|>"
Calls = list[tuple[str, dict[str, Any]]]
letters = st.characters(categories=["L", "N"], include_characters="_-./:")
names = st.lists(st.text(letters, min_size=1, max_size=6), min_size=1, max_size=3, unique=True)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(["<|assistant|>", "```", "}]"])
values = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
arguments = st.dictionaries(texts, values, max_size=4)
no_tool = st.sampled_from(["directly-answer", "directly_answer"])
fences = st.sampled_from([("Action: ```json\n", "\n```"), ("Action:\n```json\n", "```\n"), ("Action: ", "")])
# Without a brace nothing can be a call.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{<"), max_size=20) | st.sampled_from(
    ["\n", "So.\n\n", "Action:\n", "Plan: I look.\nAction: ```json\n[", "```\nf\n"]
)


@st.composite
def some_calls(draw: st.DrawFn) -> tuple[list[str], Calls]:
    """Tools, of which one name may be another's beginning, and calls of them."""
    tools = draw(names)
    tools = list(dict.fromkeys([*tools, *(name + draw(letters) for name in tools)]))
    return tools, draw(st.lists(st.tuples(st.sampled_from(tools), arguments), min_size=1, max_size=4))


def spelled(value: Any, data: st.DataObject) -> str:
    return json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 0, 4])))


def reads(family: str, tools: list[str], text: str, data: st.DataObject) -> tuple[str, Calls]:
    """What is read of `text`, which is the same however it is cut."""
    make = TOOL_PARSERS[family]
    schemas: dict[str, Any] = {name: {} for name in tools}
    content, _, calls = anonymous(make(schemas).parse(text))
    for pieces in (cut(text, data.draw(places)), list(text)):
        assert anonymous(merge_deltas(in_pieces(make(schemas), pieces))) == (content, "", calls)
    return content, [(name, json.loads(said)) for name, said in calls]


def without_blanks_beside(text: str) -> str:
    return text.rstrip("\n") if text.strip() else ""


@settings(max_examples=150, deadline=None)
@given(made=some_calls(), before=words, data=st.data())
def test_calls_of_glm4(made: tuple[list[str], Calls], before: str, data: st.DataObject) -> None:
    tools, calls = made
    between = st.sampled_from([TURN, "\n", f"\n{TURN}", f"{TURN}\n"])
    text = before + data.draw(between) if before else ""
    for name, values in calls:
        text += name + data.draw(st.sampled_from(["\n", " \n", "\n\n"])) + spelled(values, data) + data.draw(between)
    assert reads("glm4", tools, text, data) == (without_blanks_beside(before), calls)
    others = [f"{name}~" for name in tools]
    assert reads("glm4", others, text, data) == (text, [])


@settings(max_examples=150, deadline=None)
@given(made=some_calls(), before=words, data=st.data())
def test_calls_of_command_r(made: tuple[list[str], Calls], before: str, data: st.DataObject) -> None:
    tools, calls = made
    said = [{"tool_name": name, "parameters": values} for name, values in calls]
    said.insert(data.draw(st.integers(0, len(said))), {"tool_name": data.draw(no_tool), "parameters": {}})
    start, end = data.draw(fences)
    text = f"{before}\n{start}{spelled(said, data)}{end}"
    assert reads("command_r", tools, text, data) == (without_blanks_beside(before), calls)


@settings(max_examples=30, deadline=None)
@given(name=no_tool, data=st.data())
def test_to_answer_directly_is_a_call_where_a_tool_is_called_so(name: str, data: st.DataObject) -> None:
    start, end = data.draw(fences)
    text = start + spelled([{"tool_name": name, "parameters": {}}], data) + end
    assert reads("command_r", ["now"], text, data) == ("", [])
    assert reads("command_r", [name], text, data) == ("", [(name, {})])


@pytest.mark.parametrize("family", ["glm4", "command_r"])
@pytest.mark.parametrize("again", ["\n", "now\n", "Action:\n"])
def test_what_may_become_a_call_costs_time_in_its_length(family: str, again: str) -> None:
    text = "So." + again * (100_000 // len(again))
    assert merge_deltas(in_pieces(TOOL_PARSERS[family]({"now": {}}), text)).content == text
