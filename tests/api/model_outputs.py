"""Texts as models write them, whole, broken and random, for the tests of the parsers of model output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from stoker_runtime.api.tools.parsers import TOOL_PARSERS
from stoker_runtime.api.tools.parsers.base import Delta, OutputParser, Parsed, ToolParser, merge_deltas

SCHEMAS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = '{"city": "Sankt \\"Pölten\\" }{[", "days": 3}'


@dataclass(frozen=True)
class Family:
    """One format: `two` calls after the content "Sure.", what begins a call, and the pieces of random texts."""

    name: str
    two: str
    opening: str
    pieces: tuple[str, ...] = field(default=())

    def make(self) -> ToolParser:
        return TOOL_PARSERS[self.name](SCHEMAS)


_JSON = ('{"name": "', "now", '", "arguments": ', '{"city": "', '"}', "}", "{", '"', "\\", ",", ":", "[", "]", "\\ud8")
_TAGS = ("<tool_call>", "</tool_call>", "<tool", "\n", " ")
_PYTHON = ("[", "get_weather", "(", "city=", "'a'", '"', "'", ")", ",", "]", "True", "-1", "\\", "[now()]", "f(**a)")

FAMILIES = (
    Family(
        "hermes",
        'Sure.<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>\n"
        '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
        "<tool_call>",
        (*_JSON, *_TAGS),
    ),
    Family(
        "llama3_json",
        'Sure.<|python_tag|>{"name": "get_weather", "parameters": '
        + ARGUMENTS
        + '}; {"name": "now", "parameters": {}}',
        "<|python_tag|>",
        (*_JSON, "<|python_tag|>", '"parameters"', ";", "<|", " "),
    ),
    Family(
        "mistral",
        'Sure.[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + ARGUMENTS + '}, {"name": "now", "arguments": {}}]',
        "[TOOL_CALLS]",
        (*_JSON, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL", " "),
    ),
    Family(
        "pythonic",
        'Sure.<|python_start|>[get_weather(city="Sankt \\"Pölten\\" }{[", days=3), now()]<|python_end|>',
        "<|python_start|>",
        (*_PYTHON, "<|python_start|>", "<|python_end|>", "<|", " ", "\n"),
    ),
    Family(
        "olmo3",
        'Sure.<function_calls>get_weather(city="Sankt \\"Pölten\\" }{[", days=3)\nnow()</function_calls>',
        "<function_calls>",
        (*_PYTHON, "<function_calls>", "</function_calls>", "<function", " ", "\n"),
    ),
    Family(
        "minicpm",
        'Sure.<|tool_call_start|>\n```python\nget_weather(city="Sankt \\"Pölten\\" }{[",days=3)\nnow()\n```\n'
        "<|tool_call_end|>",
        "<|tool_call_start|>",
        (*_PYTHON, "<|tool_call_start|>", "<|tool_call_end|>", "```python", "```", "<|", " ", "\n"),
    ),
    Family(
        "deepseek_v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        + ARGUMENTS
        + "\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool",
            "function",
            "now",
            "\n",
            "```json",
            "```",
            '{"a": "',
            '"}',
            "{}",
        ),
    ),
    Family(
        "kimi_k2",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        + ARGUMENTS
        + "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>",
        (
            "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
            "<|tool_calls_section_end|>", "<|tool", "functions.", "now", ":1", "\n", '{"a": "', '"}', "{}",
        ),
    ),
    Family(
        "glm45",
        'Sure.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Sankt "Pölten" }{[</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><tool_call>now\n</tool_call>",
        "<tool_call>",
        (
            *_TAGS,
            "get_weather",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "city",
            "days",
            "7",
            '"',
            "{",
        ),
    ),
    Family(
        "qwen3_coder",
        'Sure.<tool_call>\n<function=get_weather>\n<parameter=city>\nSankt "Pölten" }{[\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call>",
        (*_TAGS, "<function=", "get_weather", ">", "<parameter=", "city", "days", "</parameter>", "</function>", "7"),
    ),
    Family(
        "granite",
        'Sure.<|tool_call|>[{"name": "get_weather", "arguments": ' + ARGUMENTS + '}, {"name": "now", "arguments": {}}]',
        "<|tool_call|>",
        (*_JSON, "<|tool_call|>", "<|tool", " "),
    ),
    Family(
        "phi4_mini_json",
        'Sure.<|tool_call|>[{"type": "function", "name": "get_weather", "arguments": '
        + ARGUMENTS
        + '}]<|/tool_call|>\n<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>',
        "<|tool_call|>",
        (*_JSON, "<|tool_call|>", "<|/tool_call|>", "<|tool", " "),
    ),
    Family(
        "nemotron_json",
        'Sure.<TOOLCALL>[{"name": "get_weather", "arguments": '
        + ARGUMENTS
        + '}, {"name": "now", "arguments": {}}]</TOOLCALL>',
        "<TOOLCALL>",
        (*_JSON, "<TOOLCALL>", "</TOOLCALL>", "<TOOL", " "),
    ),
    Family(
        "internlm",
        'Sure.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": '
        + ARGUMENTS
        + '}<|action_end|>\n<|action_start|><|plugin|>{"name": "now", "parameters": {}}<|action_end|>',
        "<|action_start|><|plugin|>",
        (*_JSON, "<|action_start|>", "<|plugin|>", "<|action_end|>", '"parameters"', "<|", " "),
    ),
    Family(
        "cohere",
        'Sure.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        + ARGUMENTS
        + '},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "<|START_ACTION|>",
        (*_JSON, "<|START_ACTION|>", "<|END_ACTION|>", '"tool_name"', '"parameters"', '"tool_call_id"', "<|", " "),
    ),
    Family(
        "command_r",
        'Sure.\nAction: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
        + ARGUMENTS
        + '\n    },\n    {\n        "tool_name": "directly-answer",\n        "parameters": {}\n    },\n    {\n        '
        '"tool_name": "now",\n        "parameters": {}\n    }\n]\n```',
        "Action:",
        (
            *_JSON, "Action:", "Act", "```json", "```", '"tool_name"', '"parameters"', '"directly_answer"', "\n", " ",
            '[{"tool_name": "directly-answer", "parameters": {',
        ),
    ),
    Family(
        "glm4",
        "Sure.\nget_weather\n" + ARGUMENTS + '<|assistant|>now\n{}',
        "<|assistant|>",
        (
            *_JSON, "<|assistant|>", "<|assis", "\n", "now\n", "\nnow", "get_weather", "{}", '{"city": "a"}', " ", "no",
            "\nnow\n{}", "\nget_weather \n\n{ ",
        ),
    ),
    Family(
        "seed_oss",
        'Sure.<seed:tool_call>\n<function=get_weather>\n<parameter=city>Sankt "Pölten" }{[</parameter>\n'
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n"
        "</seed:tool_call>",
        "<seed:tool_call>",
        (
            "<seed:tool_call>", "</seed:tool_call>", "<seed", "\n", " ", "<function=", "get_weather", ">",
            "<parameter=", "city", "days", "</parameter>", "</function>", "7",
        ),
    ),
    Family(
        "minimax_m2",
        'Sure.<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Sankt "Pölten" }{[</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "<minimax:tool_call>",
        (
            "<minimax:tool_call>", "</minimax:tool_call>", "<minimax", "\n", " ", '<invoke name="', "get_weather", '">',
            '<parameter name="', "city", "days", "</parameter>", "</invoke>", "7",
        ),
    ),
    Family(
        "openai",
        "<|channel|>commentary<|message|>Sure.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        "<|constrain|>json<|message|>" + ARGUMENTS + "<|call|><|start|>assistant to=functions.now<|channel|>commentary "
        "json<|message|>{}<|call|>",
        "<|channel|>",
        (
            "<|start|>",
            "assistant",
            "<|channel|>",
            "analysis",
            "final",
            "commentary",
            " to=functions.now",
            " to=python",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "<|",
            "{}",
            " ",
        ),
    ),
)  # fmt: skip
# Whose calls are calls only when their parenthesis has closed.
WHOLE = ("pythonic", "olmo3", "minicpm")
BY_NAME = {family.name: family for family in FAMILIES}


def anonymous(found: Parsed) -> tuple[str, str, list[tuple[str, str]]]:
    """An answer without the ids, which are random."""
    return found.content, found.reasoning, [(call.name, call.arguments) for call in found.tool_calls]


def in_pieces(parser: OutputParser, pieces: Iterable[str]) -> list[Delta]:
    """All deltas of a text that comes in `pieces`."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return [*deltas, *parser.finish()]


def cut(text: str, places: Iterable[int]) -> list[str]:
    """`text` cut at `places`."""
    ends = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def same_at_every_cut(make: Callable[[], OutputParser], text: str, places: Iterable[int]) -> None:
    """Assert that pieces, single characters and the whole give one answer, without empty or malformed deltas."""
    whole = anonymous(make().parse(text))
    for pieces in (cut(text, places), list(text)):
        deltas = in_pieces(make(), pieces)
        assert anonymous(merge_deltas(deltas)) == whole


def random_text(pieces: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Texts of the pieces of a format and of anything else."""
    return st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=4)), max_size=14).map("".join)


places = st.lists(st.integers(min_value=0, max_value=4000), max_size=8)
