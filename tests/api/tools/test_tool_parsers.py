"""Tool parsers: what each format means, and that no cut of the text changes it."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_outputs import (
    ARGUMENTS,
    BY_NAME,
    FAMILIES,
    WHOLE,
    Family,
    anonymous,
    cut,
    in_pieces,
    places,
    random_text,
    same_at_every_cut,
)

from stoker_runtime.api.tools.parsers import TOOL_PARSERS
from stoker_runtime.api.tools.parsers.base import CallDelta, TextDelta, merge_deltas
from stoker_runtime.api.tools.parsers.forced import NamedCallParser, RequiredCallsParser

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def read(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    content, _, calls = anonymous(BY_NAME[name].make().parse(text))
    return content, calls


@every_family
def test_two_calls_after_content(family: Family) -> None:
    found = family.make().parse(family.two)
    assert found.content == "Sure."
    assert [call.name for call in found.tool_calls] == ["get_weather", "now"]
    assert [json.loads(call.arguments) for call in found.tool_calls] == [json.loads(ARGUMENTS), {}]
    assert len({call.id for call in found.tool_calls}) == 2


@every_family
def test_every_single_cut_gives_the_same(family: Family) -> None:
    for place in range(len(family.two)):
        same_at_every_cut(family.make, family.two, [place])


@every_family
def test_every_beginning_gives_the_same_at_every_cut(family: Family) -> None:
    chance = random.Random(7)
    for end in range(len(family.two)):
        same_at_every_cut(family.make, family.two[:end], [chance.randrange(end + 1) for _ in range(3)])


@every_family
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_gives_the_same_at_any_cut(family: Family, data: st.DataObject) -> None:
    text = data.draw(random_text((family.two, *family.pieces)))
    same_at_every_cut(family.make, text, data.draw(places))


@every_family
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_broken_calls_give_the_same_at_any_cut(family: Family, data: st.DataObject) -> None:
    text = family.two
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 6))
        text = text[:start] + data.draw(st.sampled_from(("", *family.pieces))) + text[start + length :]
    same_at_every_cut(family.make, text, data.draw(places))


@every_family
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_text_without_markers_is_content_as_it_stands(family: Family, data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet=st.characters(exclude_characters="<[{", exclude_categories=["Cs"]), max_size=60))
    if text.strip():
        assert anonymous(family.make().parse(text)) == (text, "", [])


@every_family
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_words_beside_good_and_bad_calls_are_never_lost(family: Family, data: st.DataObject) -> None:
    broken = [family.opening + "~no call~", family.opening + '{"name": 5}~no call~']
    spoken = st.sampled_from([f"~word{at}~ " for at in range(9)] + broken)
    parts = data.draw(st.lists(spoken, min_size=1, max_size=8))
    at = data.draw(st.integers(0, len(parts)))
    call = "" if family.name == "openai" else family.two.removeprefix("Sure.")
    text = "".join([*parts[:at], call, *parts[at:]])
    content, reasoning, calls = anonymous(family.make().parse(text))
    for part in parts:
        assert part.strip().replace('{"name": 5}', "")[-6:] in content + reasoning
    assert (content + reasoning).count("~") == sum(part.count("~") for part in parts)
    assert len(calls) == (2 if call else 0)


@every_family
def test_content_is_not_held_back(family: Family) -> None:
    parser = family.make()
    for character in "So a is 1, (b) 2.":
        given = "".join(delta.text for delta in parser.feed(character) if isinstance(delta, TextDelta))
        assert given == character


@every_family
def test_a_call_begins_with_id_and_name_and_goes_on_in_fragments(family: Family) -> None:
    deltas = [delta for delta in in_pieces(family.make(), family.two) if isinstance(delta, CallDelta)]
    heads = [delta for delta in deltas if delta.name]
    assert [head.index for head in heads] == [0, 1]
    assert all(head.id for head in heads)
    assert all(not delta.id for delta in deltas if not delta.name)
    first = [delta for delta in deltas if delta.index == 0]
    assert first[0].name == "get_weather"
    if family.name not in WHOLE:
        assert len(first) > 10, "the arguments come as they are written"


@pytest.mark.parametrize("family", [each for each in FAMILIES if each.name not in WHOLE], ids=lambda each: each.name)
def test_a_call_cut_short_stays_a_call(family: Family) -> None:
    text = family.two[: family.two.index("Sankt") + 3]
    found = family.make().parse(text)
    assert [(call.name, call.arguments.replace(" ", "")) for call in found.tool_calls] == [
        ("get_weather", '{"city":"San')
    ]


def test_deltas_of_one_piece_are_joined() -> None:
    deltas = BY_NAME["hermes"].make().feed('Hi <tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>')
    assert deltas[0] == TextDelta("Hi ")
    assert isinstance(deltas[1], CallDelta)
    assert (deltas[1].name, deltas[1].arguments, len(deltas)) == ("now", '{"a": 1}', 2)


FORMS = [
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "", [("f", '{"a": "x\\ny"}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>!',
        "!",
        [("f", '{"a": "</tool_call>"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{}} {"name":"g","arguments":{}}</tool_call>',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("hermes", "<tool_call>talk</tool_call>", "<tool_call>talk</tool_call>", []),
    ("hermes", '<tool_call>{"nom": "f"}</tool_call>', '<tool_call>{"nom": "f"}</tool_call>', []),
    (
        "hermes",
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [],
    ),
    ("hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", ' {"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json", '{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
    ("llama3_json", '{"name": "Ann"}', '{"name": "Ann"}', []),
    ("llama3_json", 'See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
    ("llama3_json", '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', "", [("f", '{"a": 1}'), ("g", '{"b": 2}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("pythonic", '[f(a=1, b=[true, -2.5, {"k": None}])]', "", [("f", '{"a": 1, "b": [true, -2.5, {"k": null}]}')]),
    ("pythonic", "[a.f(x=')'), g()]", "", [("a.f", '{"x": ")"}'), ("g", "{}")]),
    ("pythonic", "[f(a=1), g(b=os.system('x'))]", ", g(b=os.system('x'))]", [("f", '{"a": 1}')]),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
    ("pythonic", "[f(a=b'x')]", "[f(a=b'x')]", []),
    ("pythonic", "[f(a='\\d')]", "", [("f", '{"a": "\\\\d"}')]),
    ("pythonic", "[link](http://x.y)", "[link](http://x.y)", []),
    ("pythonic", "see [f(a=1)]", "see [f(a=1)]", []),
    ("pythonic", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Done", "Done", [("f", '{"a": 1}')]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", [("f", "{}")]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>hm", "<｜tool▁calls▁begin｜>hm", []),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>[1]</arg_value></tool_call>", "", [("f", '{"a": [1]}')]),
    (
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>True</arg_value>\n</tool_call>",
        "",
        [("f", '{"a": true}')],
    ),
    (
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>NaN</arg_value>\n</tool_call>",
        "",
        [("f", '{"a": "NaN"}')],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>  12</arg_value>\n</tool_call>",
        "",
        [("get_weather", '{"city": "  12"}')],
    ),
    ("glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
    ("qwen3_coder", "<function=f>\n<parameter=a>\nx\n\ny\n</parameter>\n</function>", "", [("f", '{"a": "x\\n\\ny"}')]),
    ("qwen3_coder", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("olmo3", "<function_calls>f(a=true)\ng(\nb=[1])\n</function_calls>", "",
     [("f", '{"a": true}'), ("g", '{"b": [1]}')]),
    ("olmo3", "<function_calls>f(a=x)</function_calls>", "<function_calls>f(a=x)", []),
    ("minicpm", "<|tool_call_start|>\n```python\nf(a='1')\n```\n<|tool_call_end|>So.", "So.", [("f", '{"a": "1"}')]),
    ("granite", '<|tool_call|> [ {"name": "f", "arguments": {"a": 1}} ] beyond', " beyond", [("f", '{"a": 1}')]),
    ("granite", "<|tool_call|>[1]", "<|tool_call|>[1]", []),
    ("phi4_mini_json", '<|tool_call|>[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    ("nemotron_json", '<TOOLCALL>[{"arguments": {"a": 2}, "name": "f"}, 7]</TOOLCALL>', ", 7]</TOOLCALL>",
     [("f", '{"a": 2}')]),
    ("cohere", '<|START_ACTION|>[{"tool_name": "f", "tool_call_id": "0", "parameters": {"a": []}}]<|END_ACTION|>!', "!",
     [("f", '{"a": []}')]),
    ("cohere", '<|START_ACTION|>{"name": "f"}', '<|START_ACTION|>{"name": "f"}', []),
    ("cohere", '<|START_ACTION|>[{"tool_name": "directly_answer", "parameters": {}}]<|END_ACTION|>', "",
     [("directly_answer", "{}")]),
    ("command_r", 'Plan: I look.\n\nAction:\n```json\n[\n{"tool_name": "f", "parameters": {"a": 1}}\n]```\n',
     "Plan: I look.", [("f", '{"a": 1}')]),
    ("command_r", 'Action: [{"tool_name": "f", "parameters": {}}]', "", [("f", "{}")]),
    ("command_r", 'Action: ```\n{"parameters": {"a": []}, "tool_name": "f"}\n```', "", [("f", '{"a": []}')]),
    ("command_r", '\nAction: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```\n', "", []),
    ("command_r", 'Action: ```json\n[{"tool_name": "directly_answer", "parameters": {"x": 1}},{"tool_name": "f"}]', "",
     [("f", "{}")]),
    ("command_r", 'Plan: none.\nAction: [{"parameters": {}, "tool_name": "directly-answer"}]\n```\nAnswer: Hi',
     "Plan: none.\nAnswer: Hi", []),
    ("command_r", 'Action: ```json\n[{"tool_name": 1}]\n```', 'Action: ```json\n[{"tool_name": 1}]\n```', []),
    ("command_r", 'Action: ```json\n{"name": "f"}\n```', 'Action: ```json\n{"name": "f"}\n```', []),
    ("command_r", "Action: rest.\n\n", "Action: rest.\n\n", []),
    ("glm4", 'now\n{"a": 1}', "", [("now", '{"a": 1}')]),
    ("glm4", '\nI look.\n\n<|assistant|>now \n\n{\n "a": "x\ny"}\n', "\nI look.", [("now", '{\n "a": "x\\ny"}')]),
    ("glm4", 'now\n{}\nget_weather\n{"city": "a"}\nSo.', "So.", [("now", "{}"), ("get_weather", '{"city": "a"}')]),
    ("glm4", "now\nnow\n{}", "now", [("now", "{}")]),
    ("glm4", "now\n{\nnow\n{}", "now\n{", [("now", "{}")]),
    ("glm4", 'now\n{"a": {"b": 1}<|assistant|>now\n{}', "", [("now", '{"a": {"b": 1}'), ("now", "{}")]),
    ("glm4", 'later\n{"a": 1}', 'later\n{"a": 1}', []),
    ("glm4", "now\n\nIt is noon.\n", "now\n\nIt is noon.\n", []),
    ("glm4", "now\n{ return 1; }", "now\n{ return 1; }", []),
    ("glm4", 'It is now\n{"a": 1}', 'It is now\n{"a": 1}', []),
    ("glm4", '  f:\n  now\n  {"a": 1}', '  f:\n  now\n  {"a": 1}', []),
    ("glm4", 'now {"a": 1}', 'now {"a": 1}', []),
    ("glm4", "now", "now", []),
    ("glm4", "Hi<|assistant|>\nYou", "Hi<|assistant|>\nYou", []),
    ("seed_oss", "<seed:tool_call><function=now></function></seed:tool_call>", "", [("now", "{}")]),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">[1, "x"]</parameter><parameter name="b"> y'
     '\n</parameter></invoke></minimax:tool_call>beyond', "beyond", [("f", '{"a": [1, "x"], "b": " y\\n"}')]),
    ("minimax_m2", "<minimax:tool_call>none</minimax:tool_call>", "<minimax:tool_call>none</minimax:tool_call>", []),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">cut', "", [("f", '{"a": cut')]),
    ("openai", "no format at all", "no format at all", []),
    ("openai", "<|channel|>final<|message|>Hi<|return|>", "Hi", []),
    ("openai", "<|message|>Hi", "Hi", []),
    ("openai", " to=functions.f<|channel|>commentary<|message|>{}<|call|>", "", [("f", "{}")]),
    ("openai", "<|channel|>commentary to=functions.f<|message|>", "", [("f", "{}")]),
    ("openai", "<|channel|>final", "<|channel|>final", []),
]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), FORMS, ids=[f"{form[0]}-{form[1][:40]}" for form in FORMS]
)
def test_form(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(name, text) == (content, calls)
    for place in range(len(text)):
        same_at_every_cut(BY_NAME[name].make, text, [place])


def test_mistral_ids_are_what_its_templates_accept() -> None:
    call = BY_NAME["mistral"].make().parse('[TOOL_CALLS]f[ARGS]{"a": 1}').tool_calls[0]
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_kimi_ids_are_the_models_own() -> None:
    found = BY_NAME["kimi_k2"].make().parse(BY_NAME["kimi_k2"].two)
    assert [each.id for each in found.tool_calls] == ["functions.get_weather:0", "functions.now:1"]


def test_declared_strings_stream_while_other_values_wait() -> None:
    parser = BY_NAME["glm45"].make()
    parser.feed("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>")
    assert parser.feed('Par"is') == [CallDelta(0, arguments='Par\\"is')]
    parser.feed("</arg_value>\n<arg_key>days</arg_key>\n<arg_value>")
    assert parser.feed("12") == []
    assert parser.feed("</arg_value>") == [CallDelta(0, arguments="12")]


def test_blanks_beside_calls_are_dropped_and_others_kept() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read("hermes", f"\n\n{call}\n{call}\n")[0] == ""
    assert read("hermes", "  indented\n") == ("  indented\n", [])
    assert read("hermes", " \n ") == (" \n ", [])


def test_harmony_reasoning_and_built_in_tools() -> None:
    text = (
        "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis to=browser.search<|message|>two"
        "<|call|><|start|>assistant<|channel|>final<|message|>three<|return|>"
    )
    found = BY_NAME["openai"].make().parse(text)
    assert (found.reasoning, found.content, found.tool_calls) == ("one\ntwo", "three", ())


def test_forced_calls() -> None:
    required = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert anonymous(RequiredCallsParser().parse(required))[2] == [("f", '{"a": 1}'), ("g", "{}")]
    assert anonymous(NamedCallParser("f").parse(' {"a": 1}'))[2] == [("f", '{"a": 1}')]
    for end in range(len(required)):
        same_at_every_cut(RequiredCallsParser, required[:end], [end // 2, end // 3])
    assert NamedCallParser("f").parse("").tool_calls == ()


def test_a_long_answer_costs_time_in_its_length() -> None:
    # Arguments before the name are held back until the end; 200,000 single characters take well under the timeout.
    text = '<tool_call>{"arguments": {"a": "' + "x" * 200_000 + '"}, "name": "f"}</tool_call>'
    found = merge_deltas(in_pieces(BY_NAME["hermes"].make(), text))
    assert len(found.tool_calls[0].arguments) == 200_009


def test_every_parser_is_among_the_families() -> None:
    assert {TOOL_PARSERS[name] for name in BY_NAME} == set(TOOL_PARSERS.values())


def test_every_name_makes_a_parser() -> None:
    for name, parser in TOOL_PARSERS.items():
        assert parser({}).parse(f"I am {name}.").content == f"I am {name}."


def test_cutting_keeps_the_text() -> None:
    assert "".join(cut("abc", [1, 7, 2])) == "abc"
