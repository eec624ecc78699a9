"""Structural tags as grammars, tried on texts."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken

from stoker_runtime.api.constraints.structural_tags import structural_tag
from stoker_runtime.errors import RequestError
from stoker_runtime.sampling import grammar
from stoker_runtime.text.tokenizer import Tokenizer, TokenizerFiles

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
CALL = {"begin": "<call>", "content": JSON, "end": "</call>"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, and two special tokens."""
    rust = Tokenizer.synthetic()._rust
    rust.add_special_tokens([AddedToken("<|tool|>", special=True), AddedToken("[TOOL]", special=True)])
    return Tokenizer(rust, TokenizerFiles(), "test")


@pytest.fixture(scope="module")
def trie(tokenizer: Tokenizer) -> LLTokenizer:
    return grammar.build_tokenizer(tokenizer, 259, (258,))


def accepts(value: dict[str, Any], text: str, tokenizer: Tokenizer, trie: LLTokenizer) -> bool:
    constraint = structural_tag(value, tokenizer, "tag")
    grammar.check(constraint, grammar.build_byte_tokenizer(tokenizer))
    matcher = grammar.compile_matcher(constraint, trie)
    ids = tokenizer.encode(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


LEGACY = {
    "structures": [
        {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]}
SPECIAL = {"type": "triggered_tags", "triggers": ["<|tool|>"], "tags": [{**CALL, "begin": "<|tool|>f", "end": "."}]}
THINK = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
        {"type": "or", "elements": [{"type": "const_string", "value": "none"}, {"type": "tag", **CALL}]},
    ],
}
SEPARATED = {"type": "tags_with_separator", "tags": [CALL], "separator": ";"}


@pytest.mark.parametrize(
    ("value", "text", "matches"),
    [
        (LEGACY, "just words", True),
        (LEGACY, 'so: <f=a>{"x": 1}</f> and <f=b>null</f> done', True),
        (LEGACY, "<f=b>true</f>", False),
        (LEGACY, "<f=c>", False),
        ({"format": TRIGGERED}, "no call", True),
        ({"format": TRIGGERED}, 'a <call>{"x": 1}</call> b', True),
        ({"format": {**TRIGGERED, "at_least_one": True}}, "no call", False),
        ({"format": {**TRIGGERED, "stop_after_first": True}}, 'a <call>{"x": 1}</call>', True),
        ({"format": {**TRIGGERED, "stop_after_first": True}}, 'a <call>{"x": 1}</call> b', False),
        ({"format": SPECIAL}, 'a <|tool|>f{"x": 1}. b', True),
        ({"format": SPECIAL}, "a <|tool|>g", False),
        ({"format": THINK}, "<think>a < b\n</think>none", True),
        ({"format": THINK}, '<think></think><call>{"x": 2}</call>', True),
        ({"format": THINK}, "<think>a</think>some", False),
        ({"format": SEPARATED}, "", True),
        ({"format": SEPARATED}, '<call>{"x": 1}</call>;<call>{"x": 2}</call>', True),
        ({"format": SEPARATED}, '<call>{"x": 1}</call>;', False),
        ({"format": {**SEPARATED, "at_least_one": True}}, "", False),
        ({"format": {"type": "regex", "pattern": "a/b+"}}, "a/bb", True),
    ],
)
def test_texts(value: dict[str, Any], text: str, matches: bool, tokenizer: Tokenizer, trie: LLTokenizer) -> None:
    assert accepts(value, text, tokenizer, trie) is matches


def nested(depth: int) -> dict[str, Any]:
    return {"type": "sequence", "elements": [nested(depth - 1)]} if depth else {"type": "any_text"}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "'structures'"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}, "none of the triggers"),
        ({"structures": [], "triggers": ["<b"]}, "no tags"),
        ({"structures": [3], "triggers": ["<b"]}, "'begin'"),
        ({"format": {"type": "qwen_xml"}}, "'qwen_xml' is not supported"),
        ({"format": {"type": "const_string"}}, "'value'"),
        ({"format": {"type": "or", "elements": []}}, "no elements"),
        ({"format": {"type": "json_schema", "json_schema": 3}}, "'json_schema'"),
        ({"format": {"type": "const_string", "value": "a[TOOL]"}}, "'[TOOL]' cannot stand in a grammar"),
        ({"format": nested(40)}, "nested"),
    ],
)
def test_refused(value: dict[str, Any], says: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        structural_tag(value, tokenizer, "tag")
    assert says in caught.value.message
    assert caught.value.param == "tag"
