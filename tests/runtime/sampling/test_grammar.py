"""What can be enforced, what cannot and why, and the tries of real and synthetic vocabularies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tests import real_models

from stoker_runtime.errors import ModelError, RequestError
from stoker_runtime.request import Constraint, ConstraintKind
from stoker_runtime.sampling import grammar
from stoker_runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def letters() -> LLTokenizer:
    return grammar.build_byte_tokenizer(Tokenizer.synthetic())


def accepts(constraint: Constraint, text: str, trie: LLTokenizer) -> bool:
    matcher = grammar.compile_matcher(constraint, trie)
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def lark(text: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, text)


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
TEXT = {"type": "string"}
IMPOSSIBLE: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"not": TEXT}, "not"),
    ({"if": {}, "then": {}}, "if"),
    ({"type": "object", "dependentSchemas": {}}, "dependentSchemas"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {}}}, "maxProperties"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({**TEXT, "format": "postcode"}, "Unknown format: postcode"),
    ({**TEXT, "format": "date", "pattern": "x"}, "pattern, format or length: "),
    ({**TEXT, "pattern": "(?=a)b"}, "pattern: "),
    ({**TEXT, "pattern": "["}, "pattern: "),
    ({**TEXT, "pattern": r"(a)\1"}, "backreferences"),
    ({**TEXT, "pattern": "^a$", "minLength": 5}, "pattern, format or length: "),
    ({"type": "object", "patternProperties": {"[": {}}}, "pattern: "),
    ({"$ref": "#/$defs/none"}, "$ref: "),
    ({"$ref": "https://example.com/x.json"}, "$ref: "),
    ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum (3) is greater than maximum (1)"),
    ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1}, "exclusiveMinimum (1)"),
    ({**TEXT, "minLength": 5, "maxLength": 1}, "minLength (5) is greater than maxLength (1)"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems (3) is greater than maxItems (1)"),
    ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "minItems: "),
    ({"type": "integer", "multipleOf": 0}, "multipleOf: "),
    ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}, "multipleOf: "),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required: "),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required: "),
    ({"enum": []}, "enum"),
    ({"anyOf": []}, "anyOf"),
    ({"type": []}, "type"),
    ({"type": "thing"}, "type: Invalid type: thing"),
    ({"const": 1, "type": "string"}, "type: "),
    ({"allOf": [TEXT, {"type": "integer"}]}, "type: "),
    ({"oneOf": [TEXT, {**TEXT, "maxLength": 3}]}, "oneOf"),
    ({"properties": 3}, "properties must be an object"),
    ({"required": "a"}, "'required'"),
    ({**TEXT, "minLength": "x"}, "'minLength'"),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, "$ref: what #/$defs/node requires holds itself"),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "$ref: what # requires"),
    ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "uniqueItems"),
    (False, "schema is false"),
]


@pytest.mark.parametrize(("schema", "says"), IMPOSSIBLE, ids=[says for _, says in IMPOSSIBLE])
def test_schema_that_cannot_be_enforced(schema: Any, says: str, letters: LLTokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        grammar.check(grammar.json_schema(schema), letters)
    assert says in caught.value.message
    assert "(And" not in caught.value.message, "no dump of internals"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "required": []}}},
        {"$ref": "#/$defs/node", "$defs": {"node": {"anyOf": [{"type": "null"}, NODE]}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x~1y"}}, "required": ["a"], "$defs": {"x/y": TEXT}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": TEXT}},
        {"oneOf": [TEXT, {"type": "integer"}]},
        {**TEXT, "title": "T", "description": "D", "default": "", "examples": ["x"], "readOnly": True, "$comment": "C"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "definitions": {"a": TEXT}},
    ],
)
def test_schemas_that_are_fine(schema: Any, letters: LLTokenizer) -> None:
    grammar.check(grammar.json_schema(schema), letters)


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (Constraint(ConstraintKind.JSON_SCHEMA, "{"), "cannot be read"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "[" * 100_000), "cannot be read"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "[1]"), "schema must be an object or boolean"),
        (regex("["), "unclosed character class"),
        (regex("a(?=b)"), "look-around"),
        (lark("start: nope"), 'unknown name: "nope"'),
        (lark('start: <nope> "a"'), "unknown special token"),
        (lark('root ::= "a" | ( [0-9'), "cannot be read"),
        (lark('start: a\na: a "x"'), "no output matches it"),
    ],
)
def test_text_that_cannot_be_used(constraint: Constraint, says: str, letters: LLTokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        grammar.check(constraint, letters)
    assert says in caught.value.message
    assert "<state>" not in caught.value.message


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("ab", "ab", True),
        ("ab", "xab", False),
        ("^ab$", "ab", True),
        (r"^a\$", "a$", True),
        (r"^a\\$", "a\\", True),
        ("(?i)yes|no", "YES", True),
        (r"\d{3}-\d{4}", "555-1234", True),
        (r"\d{3}-\d{4}", "555-123", False),
    ],
)
def test_regex(pattern: str, text: str, matches: bool, letters: LLTokenizer) -> None:
    assert accepts(regex(pattern), text, letters) is matches


@pytest.mark.parametrize("text", ['a"b', "é\n", "a/b", "\\", "<end>", "yes"])
def test_choice(text: str, letters: LLTokenizer) -> None:
    constraint = grammar.choice([text, "other"])
    assert accepts(constraint, text, letters)
    assert accepts(constraint, "other", letters)
    assert not accepts(constraint, text + "x", letters)


def test_gbnf_and_lark(letters: LLTokenizer) -> None:
    gbnf = lark('root ::= "x" | [0-9]+ tail\ntail ::= "."')
    assert accepts(gbnf, "12.", letters)
    assert not accepts(gbnf, "12", letters)
    assert accepts(lark('start: A+\nA: "a" | "b"'), "abba", letters)


def test_json_is_one_line_unless_the_request_says_otherwise(letters: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    plain = grammar.json_schema({**schema, "additionalProperties": {"type": "array", "items": {"type": "null"}}})
    assert accepts(plain, json.dumps({"a": 38, "later": [None, None]}), letters)
    several = ('{"a": 1,"b": []}', '{"a": 1, "b": [null,null]}')
    for text in ('{\n  "a": 1\n}', '{"a":1}', '{ "a": 1}', '{"a" : 1}', *several):
        assert not accepts(plain, text, letters)
    assert accepts(grammar.json_schema(schema, "[ \n]{0,3}"), '{\n  "a": 1\n}', letters)
    assert not accepts(grammar.json_schema(schema, ""), '{"a": 1}', letters)
    assert accepts(grammar.json_schema(schema, " ?"), '{ "a" : 1 }', letters)
    assert accepts(grammar.json_schema(True), "[1, {}]", letters)


def test_closed_objects_hold_what_they_describe() -> None:
    inner = {"properties": {"tail": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {
            "input": {"type": "integer"},
            "open": {**inner, "additionalProperties": True},
            "patterns": {**inner, "patternProperties": {"^x": {}}},
            "free": {"type": "object"},
            "listed": {"type": "array", "items": inner},
            "both": {"allOf": [inner, {"properties": {"head": {}}}]},
        },
        "$defs": {"one": inner},
        "default": inner,
    }
    found = grammar.closed(schema, described=True)
    assert found["additionalProperties"] is False
    assert found["properties"]["listed"]["items"] == {**inner, "additionalProperties": False}
    assert found["$defs"]["one"] == {**inner, "additionalProperties": False}
    for same in ("input", "open", "patterns", "free", "both"):
        assert found["properties"][same] == schema["properties"][same]  # type: ignore[index]
    assert found["default"] == inner
    assert grammar.closed({"type": "object"}) == {"type": "object", "additionalProperties": False}


def allowed(matcher: LLMatcher) -> set[int]:
    bits = matcher.compute_bitmask()
    return {token for token in range(8 * len(bits)) if bits[token // 8] >> (token % 8) & 1}


VOCAB = 49152 + 40
"""SmolLM2's vocabulary, as if it were padded by ids without text."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(real_models.smollm2()))


@pytest.fixture(scope="module")
def trie(tokenizer: Tokenizer) -> LLTokenizer:
    return grammar.build_tokenizer(tokenizer, VOCAB, (2, 0))


class TestSmolLM2:
    """The trie of a real vocabulary."""

    def test_bytes_are_ours(self, tokenizer: Tokenizer, trie: LLTokenizer) -> None:
        for token in range(3, 49152, 7):
            assert trie.decode_bytes([token]) == tokenizer.token_bytes(token)

    def test_text_holds_no_special_and_no_empty_tokens(self, tokenizer: Tokenizer, trie: LLTokenizer) -> None:
        legal = allowed(grammar.compile_matcher(regex(r"(.|\n){3,9}"), trie))
        assert len(legal) > 30_000
        assert legal.isdisjoint(tokenizer.special_ids)
        assert max(legal) < 49152

    def test_both_ends_are_legal_where_the_grammar_accepts(self, tokenizer: Tokenizer, trie: LLTokenizer) -> None:
        matcher = grammar.compile_matcher(regex("a|ab"), trie)
        assert allowed(matcher).isdisjoint((0, 2))
        assert matcher.consume_token(tokenizer.encode("a")[0])
        assert allowed(matcher) >= {0, 2}

    def test_special_token_in_a_text_is_characters(self, tokenizer: Tokenizer, trie: LLTokenizer) -> None:
        matcher = grammar.compile_matcher(grammar.choice(["<|im_end|>"]), trie)
        assert 2 not in allowed(matcher)
        ids = tokenizer.encode_plain("<|im_end|>")
        assert len(ids) > 1
        assert tokenizer.decode(ids) == "<|im_end|>"
        assert matcher.try_consume_tokens(ids) == len(ids)

    def test_special_token_by_name(self, trie: LLTokenizer) -> None:
        assert allowed(grammar.compile_matcher(lark('start: <|im_start|> "x"'), trie)) == {1}

    def test_tokens_of_an_object(self, tokenizer: Tokenizer, trie: LLTokenizer) -> None:
        matcher = grammar.compile_matcher(grammar.json_schema({"type": "object"}), trie)
        text = json.dumps({"name": "Zoë", "list": [1, 2.5, None, {"a": True}]}, ensure_ascii=False)
        ids = tokenizer.encode(text)
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_stopped()


def test_compiler_compiles_once_and_loads_late() -> None:
    loads: list[int] = []

    def load() -> LLTokenizer:
        loads.append(1)
        return grammar.build_tokenizer(Tokenizer.synthetic(), 256, ())

    compiler = grammar.GrammarCompiler(load)
    assert not loads
    first = compiler.start(regex("a+"))
    assert compiler.start(regex("a+")) is first
    assert allowed(first.result(30)) == {ord("a")}
    with pytest.raises(RequestError, match="unclosed"):
        compiler.start(regex("[")).result(30)
    for number in range(grammar.MAX_PROTOTYPES):
        compiler.start(regex(f"b{number}")).result(30)
    assert compiler.start(regex("a+")) is not first
    assert loads == [1]


def test_compiler_passes_on_that_there_is_no_tokenizer() -> None:
    def load() -> LLTokenizer:
        raise ModelError("no tokenizer here")

    with pytest.raises(ModelError, match="no tokenizer here"):
        grammar.GrammarCompiler(load).start(regex("a")).result(30)
