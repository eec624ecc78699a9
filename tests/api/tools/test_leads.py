"""Reasoning before a constrained answer: what the grammar lets through, and how the answer is read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from api_server import Running, make_state, serve, stream
from fake_engine import EOS, FakeEngine
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from stoker_runtime.api.openai.answer import AnswerParser, plan_reading
from stoker_runtime.api.tools.dialect import Dialect
from stoker_runtime.api.tools.forced_calls import forced_constraint
from stoker_runtime.api.tools.leads import harmony_lead, text_lead
from stoker_runtime.api.tools.parsers.base import merge_deltas
from stoker_runtime.api.tools.reasoning import THINK, Opened, Tags
from stoker_runtime.api.tools.tools import FunctionSpec, ToolSpec, ToolUse
from stoker_runtime.request import Constraint, ConstraintKind
from stoker_runtime.sampling import grammar
from stoker_runtime.text.tokenizer import BYTE_OF_CHARACTER, Tokenizer, TokenizerFiles

PLAIN = Tokenizer.synthetic(512)
JSON = grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
CHOICE = grammar.choice(["yes", "no"])
DIGITS = Constraint(ConstraintKind.REGEX, "[0-9]{2}")
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


def with_specials(*names: str) -> Tokenizer:
    """A byte tokenizer with these special tokens."""
    rust = RustTokenizer(models.BPE(dict(BYTE_OF_CHARACTER), []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer(rust, TokenizerFiles(), "test")


def accepts(constraint: Constraint, tokenizer: Tokenizer, text: str) -> bool:
    """Whether `text` is a whole output, special tokens as tokens."""
    vocab = max(max(tokenizer.special_ids, default=0), 255) + 2
    trie: LLTokenizer = grammar.build_tokenizer(tokenizer, vocab, (vocab - 1,))
    matcher: LLMatcher = grammar.compile_matcher(constraint, trie)
    tokens = tokenizer.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize("special", [(), ("</think>",), ("<think>", "</think>")], ids=["text", "end", "both"])
@pytest.mark.parametrize(
    ("answer", "good", "bad"), [(JSON, '{"a": 1}', "{}"), (CHOICE, "yes", "maybe"), (DIGITS, "42", "4")]
)
@pytest.mark.parametrize(
    ("opened", "texts", "wrong"),
    [
        (Opened.OVER, [""], ["hm</think>", "<think>hm</think>"]),
        (Opened.YES, ["hm</think>", 'Say {"b": 1}\n</think>\n\n', "</think>", "<think>hm</think>"], ["", "hm"]),
        (Opened.OPEN, ["", "<think>\nhm\n</think>\n\n", "\n<think></think>"], ["hm</think>", "<think>hm"]),
    ],
    ids=["over", "yes", "open"],
)
def test_reasoning_is_free_and_the_answer_is_not(
    special: tuple[str, ...],
    answer: Constraint,
    good: str,
    bad: str,
    opened: Opened,
    texts: list[str],
    wrong: list[str],
) -> None:
    tokenizer = with_specials(*special)
    led = replace(answer, lead=text_lead(THINK, opened, tokenizer))
    for text in texts:
        assert accepts(led, tokenizer, text + good), text
        assert not accepts(led, tokenizer, text + bad), text
    for text in wrong:
        assert not accepts(led, tokenizer, text + good), text


@pytest.mark.parametrize("special", [(), ("[THINK]", "[/THINK]")], ids=["text", "tokens"])
def test_tags_without_angle_brackets(special: tuple[str, ...]) -> None:
    tags = Tags("[THINK]", "[/THINK]")
    tokenizer = with_specials(*special)
    led = replace(CHOICE, lead=text_lead(tags, Opened.OPEN, tokenizer))
    assert accepts(led, tokenizer, "[THINK]hm[/THINK]yes")


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
SPECS = tuple(
    ToolSpec(type="function", function=FunctionSpec(name=name, parameters=parameters))
    for name, parameters in (("weather", CITY), ("now", None))
)
SCHEMAS = {each.function.name: each.function.parameters or {} for each in SPECS}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"


@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_harmony_calls(thought: str) -> None:
    tokenizer = with_specials(*HARMONY_TOKENS)
    required = forced_constraint(ToolUse("required", "", SPECS, True, SCHEMAS), harmony=True)
    named = forced_constraint(ToolUse("named", "weather", SPECS, True, SCHEMAS), harmony=True)
    assert required is not None
    assert named is not None
    assert accepts(required, tokenizer, thought + CALL)
    assert accepts(required, tokenizer, thought + NOW)
    assert accepts(named, tokenizer, thought + CALL)
    assert not accepts(named, tokenizer, thought + NOW)
    assert not accepts(required, tokenizer, thought + "<|channel|>final<|message|>Hi")
    assert not accepts(required, tokenizer, thought + CALL.replace("Rome", "Oslo"))
    reading = plan_reading(
        Dialect("openai", "", True), ToolUse("named", "weather", SPECS, True, SCHEMAS), "", None, True
    )
    parser = AnswerParser(reading)
    found = merge_deltas(parser.read(thought + CALL, last=True))
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("weather", '{"city": "Rome"}')]
    assert not parser.called, "a named call ends with stop"


@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_harmony_answer(thought: str) -> None:
    tokenizer = with_specials(*HARMONY_TOKENS)
    led = replace(JSON, lead=harmony_lead())
    assert accepts(led, tokenizer, thought + '<|channel|>final<|message|>{"a": 1}')
    assert not accepts(led, tokenizer, thought + "<|channel|>final<|message|>{}")
    assert not accepts(led, tokenizer, '{"a": 1}')


CALL_TEXT = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>")], ids=["text", "tokens"])
@pytest.mark.parametrize("thought", ["", "<think>hm</think>\n"])
def test_calls_may_stand_in_place_of_a_response_format(special: tuple[str, ...], thought: str) -> None:
    tokenizer = with_specials(*special)
    use = ToolUse("auto", "", SPECS, True, SCHEMAS)
    reading = plan_reading(Dialect("hermes", "qwen3", True), use, "", None, True)
    either = replace(JSON, lead=reading.lead(tokenizer, calls=True))
    only = replace(JSON, lead=reading.lead(tokenizer))
    for text in (CALL_TEXT, CALL_TEXT + "\n" + CALL_TEXT):
        assert accepts(either, tokenizer, thought + text)
        assert not accepts(only, tokenizer, thought + text)
    assert accepts(either, tokenizer, thought + '{"a": 1}')
    assert not accepts(either, tokenizer, thought + "Hello")
    parser = AnswerParser(reading)
    assert [call.name for call in merge_deltas(parser.read(thought + CALL_TEXT, last=True)).tool_calls] == ["now"]
    assert parser.called


@pytest.mark.parametrize(
    ("family", "special", "calls"),
    [
        ("glm4", "<|assistant|>", ["now\n{}", '\nweather\n{"city": "Rome"}<|assistant|>now\n{}']),
        ("command_r", "<|END_OF_TURN_TOKEN|>", ['Action: ```json\n[{"tool_name": "now", "parameters": {}}]\n```']),
    ],
)
def test_calls_without_a_marker_may_stand_in_place_of_a_response_format(
    family: str, special: str, calls: list[str]
) -> None:
    tokenizer = with_specials(special)
    reading = plan_reading(Dialect(family, "", True), ToolUse("auto", "", SPECS, True, SCHEMAS), "", None, True)
    either = replace(JSON, lead=reading.lead(tokenizer, calls=True))
    for text in calls:
        assert accepts(either, tokenizer, text)
        assert merge_deltas(AnswerParser(reading).read(text, last=True)).tool_calls[-1].name == "now"
    assert accepts(either, tokenizer, '{"a": 1}')
    for text in ("Hello", "nowhere\n{}", f"{special}now\n{{}}", '{"b": 1}'):
        assert not accepts(either, tokenizer, text), text


def test_without_reasoning_calls_may_come_and_without_either_nothing() -> None:
    tokenizer = with_specials()
    reading = plan_reading(Dialect("hermes", "", True), ToolUse("auto", "", SPECS, True, SCHEMAS), "", None, True)
    assert reading.lead(tokenizer) == ""
    either = replace(JSON, lead=reading.lead(tokenizer, calls=True))
    assert accepts(either, tokenizer, CALL_TEXT)
    assert accepts(either, tokenizer, '{"a": 1}')


def test_harmony_calls_may_stand_in_place_of_a_response_format() -> None:
    tokenizer = with_specials(*HARMONY_TOKENS)
    either = replace(JSON, lead=harmony_lead(calls=True))
    for thought in ("", THOUGHT):
        assert accepts(either, tokenizer, thought + CALL)
        assert accepts(either, tokenizer, thought + '<|channel|>final<|message|>{"a": 1}')
        assert not accepts(either, tokenizer, thought + "<|channel|>final<|message|>Hi")


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %}<think>{% endif %}{# </think> #}"
PATH = "/v1/chat/completions"
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    engine = FakeEngine()
    engine.max_model_len = 1024
    yield from serve(make_state(engine, TEMPLATE), engine)


def ask(server: Running, says: str, **body: Any) -> dict[str, Any]:
    """The choice, whole; the stream agrees with it, and the constraint allows what was said."""
    server.engine.script = lambda _: [*says.encode(), EOS]
    with httpx.Client(base_url=server.url) as http:
        whole: dict[str, Any] = http.post(PATH, json={"messages": [{"role": "user", "content": "hi"}], **body}).json()
        choice: dict[str, Any] = whole["choices"][0]
        events = [
            event["choices"][0] for event in stream(http, PATH, messages=[{"role": "user", "content": "hi"}], **body)
        ]
    reasoning = "".join(event["delta"].get("reasoning", "") for event in events)
    assert reasoning == (choice["message"]["reasoning"] or "")
    assert "".join(event["delta"].get("content") or "" for event in events) == (choice["message"]["content"] or "")
    assert events[-1]["finish_reason"] == choice["finish_reason"]
    constraint = server.engine.requests[-1].params.constraint
    assert constraint is not None
    assert accepts(constraint, PLAIN, says)
    assert not accepts(constraint, PLAIN, says + "!")
    return choice


@pytest.mark.parametrize(
    ("thinking", "says"), [(True, "Hm, {</think>\n\n"), (False, "<think>\nHm, {\n</think>\n"), (False, "")]
)
def test_a_model_that_reasons_does_so_before_forced_calls_and_formats(
    thinker: Running, thinking: bool, says: str
) -> None:
    extra = {"chat_template_kwargs": {"thinking": thinking}}
    thought = "Hm, {" if says else None
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ask(thinker, says + '{"city": "Rome"}', tools=TOOLS, tool_choice=named, **extra)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (thought, None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert choice["finish_reason"] == "stop"
    required = [{"name": "weather", "parameters": {"city": "Paris"}}]
    choice = ask(thinker, says + json.dumps(required), tools=TOOLS, tool_choice="required", **extra)
    assert choice["message"]["reasoning"] == thought
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert choice["finish_reason"] == "tool_calls"
    choice = ask(thinker, says + '{"city": "Rome"}', guided_json=CITY, **extra)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (thought, '{"city": "Rome"}')
