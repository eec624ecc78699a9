"""Constraints as grammars over a model's tokens: what can be enforced, and the matchers that enforce it.

The work is llguidance's: an Earley parser over a lexer of regular-expression derivatives, walked along a trie of the
vocabulary. Its messages name the keyword, the format or the place in a grammar that is at fault.

Invariants: torch-free. Nothing is imported, built or started before the first constraint comes. JSON is one line with
`": "` and `", "`, as models have read the most of it, unless a request says otherwise: no model gets lost in blanks.
A pattern matches the whole output.
Knows nothing of sequences, batches or devices.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint, ConstraintKind
from stoker_runtime.sampling.schema_check import blame, endless

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from stoker_runtime.text.tokenizer import Tokenizer

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""What llguidance is told of the blanks of JSON that a request says nothing of."""
MAX_PROTOTYPES = 64
COMPILE_THREADS = 2
MAX_MESSAGE = 500
BYTES = 256
VALUES = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""


class Vocabulary:
    """A vocabulary as llguidance wants to see it: the bytes of every id, and how a text is cut into ids."""

    def __init__(
        self, tokens: list[bytes], special: Sequence[int], eos: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos
        self.bos_token_id: int | None = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """The ids of `text`, which is a string: llguidance asks with bytes once, to find that out."""
        if not isinstance(text, str):
            raise TypeError("text is a string")
        return self._encode(text)


def build_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The trie of a model's tokens; up to a second of work. Ids without text are legal nowhere.

    llguidance needs an id that ends a text. Where the model has none (`eos_ids` empty) the last id of the vocabulary
    serves, which can then not be text; its bit in a mask means "may end here" and must be cleared.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = list(eos_ids) or [vocab_size - 1]
    tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
    special = {token for token in tokenizer.special_ids if token < vocab_size} | set(ends)
    vocabulary = Vocabulary(tokens, sorted(special), ends[0], tokenizer.encode_plain)
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=ends)


def build_byte_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    """A small stand-in for `build_tokenizer`, to check constraints with: bytes, and the special tokens by name."""
    from llguidance import LLTokenizer, TokenizerWrapper

    names = [tokenizer.token_bytes(token) for token in sorted(tokenizer.special_ids)]
    tokens = [bytes([byte]) for byte in range(BYTES)] + names + [b"<end>"]
    special = range(BYTES, len(tokens))
    vocabulary = Vocabulary(tokens, special, len(tokens) - 1, lambda text: list(text.encode()))
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(tokens), eos_token=[len(tokens) - 1])


def to_grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's own notation. Raises RequestError for text that cannot be read."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    text = constraint.text
    try:
        if constraint.kind is ConstraintKind.JSON_SCHEMA:
            return _led(constraint.lead, _json_grammar(text))
        if constraint.kind is ConstraintKind.REGEX:
            return _led(constraint.lead, LLMatcher.grammar_from_regex(_without_anchors(text)))
        lark = LLMatcher.grammar_from_lark(any_to_lark(text))
        return _led(constraint.lead, json.dumps({"grammars": [{"lark_grammar": lark}]})) if constraint.lead else lark
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise RequestError(f"The {_title(constraint)} cannot be read: {error}") from error


def check(constraint: Constraint, tokenizer: LLTokenizer) -> None:
    """Raise RequestError unless some output matches `constraint`, saying what cannot be enforced."""
    matcher = compile_matcher(constraint, tokenizer)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(f"The {_title(constraint)} is impossible: no output matches it.")
    if constraint.kind is not ConstraintKind.JSON_SCHEMA:
        return
    try:
        loop = endless(json.loads(constraint.text))
    except RecursionError as error:
        raise RequestError("The JSON schema is nested too deeply.") from error
    if loop is not None:
        raise RequestError(f"The JSON schema is impossible: $ref: what {loop} requires holds itself without an end.")


def compile_matcher(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the start of its output. Raises RequestError for what cannot be enforced."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, to_grammar(constraint), log_level=0)
    if matcher.is_error():
        message = explain(matcher)
        if constraint.kind is ConstraintKind.JSON_SCHEMA:
            message = blame(message)
        raise RequestError(f"The {_title(constraint)} cannot be enforced: {message}")
    return matcher


def explain(matcher: LLMatcher) -> str:
    """What llguidance says of a matcher's error, without the dump of its state."""
    message: str = matcher.get_error()
    return message.split("<state>")[0].strip()[:MAX_MESSAGE]


def choice(options: Sequence[str]) -> Constraint:
    """The constraint that the output is one of `options`."""
    alternatives = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    return Constraint(ConstraintKind.GRAMMAR, f"start: {alternatives}")


def json_schema(schema: dict[str, Any] | bool, blanks: str | None = None) -> Constraint:
    """The constraint that the output is JSON after `schema`; properties come in the order in which it names them.

    `blanks` is a pattern for the white space between the parts; "" allows none, None those of one line.
    """
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(with_blanks(schema, blanks), ensure_ascii=False))


def with_blanks(schema: dict[str, Any] | bool, blanks: str | None = None) -> dict[str, Any] | bool:
    """`schema` with what its white space may be, in llguidance's notation; as it is where it says so itself."""
    if schema is False or (blanks is None and isinstance(schema, dict) and "x-guidance" in schema):
        return schema
    options: dict[str, Any] = {"whitespace_pattern": blanks} if blanks else {"whitespace_flexible": False}
    if blanks is None:
        options = ONE_LINE
    return {**(schema if isinstance(schema, dict) else {}), "x-guidance": options}


def closed(schema: Any, *, described: bool = False) -> Any:
    """`schema` with every object closed that says nothing of further properties; `described`: that names properties.

    Not within `allOf`: what one part does not name another one may, and they would leave nothing together.
    """
    if isinstance(schema, list):
        return [closed(each, described=described) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = (*VALUES, "allOf")
    found = {key: value if key in kept else closed(value, described=described) for key, value in schema.items()}
    is_object = isinstance(found.get("properties"), dict) if described else found.get("type") == "object"
    if is_object and not {"additionalProperties", "patternProperties", "allOf"} & set(found):
        found["additionalProperties"] = False
    return found


class GrammarCompiler:
    """Compiles constraints in the background, each once; what it gives is copied for each sequence.

    `load` gives the model's tokenizer when the first constraint comes.
    """

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._prototypes: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()

    def start(self, constraint: Constraint) -> Future[LLMatcher]:
        """The matcher of `constraint` to copy, at its first token; the future raises RequestError or ModelError."""
        known = self._prototypes.get(constraint)
        if known is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
            known = self._prototypes[constraint] = self._pool.submit(self._compile, constraint)
            if len(self._prototypes) > MAX_PROTOTYPES:
                self._prototypes.popitem(last=False)
        self._prototypes.move_to_end(constraint)
        return known

    def _compile(self, constraint: Constraint) -> LLMatcher:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
        matcher = compile_matcher(constraint, self._tokenizer)
        # The first mask is the dearest: copies start from a lexer that knows it.
        matcher.compute_bitmask()
        return matcher


def _json_grammar(text: str) -> str:
    """A schema in llguidance's notation, on one line unless the schema says itself what it allows."""
    from llguidance import LLMatcher

    schema = json.loads(text)
    if schema is True or (isinstance(schema, dict) and "x-guidance" not in schema):
        schema = with_blanks(schema)
    # Leniency would be silence about keywords that are not enforced.
    overrides: Any = {"lenient": False} if isinstance(schema, dict) else None
    return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=overrides)


def _led(lead: str, answer: str) -> str:
    """`answer` where `lead` says `@answer`."""
    if not lead:
        return answer
    named = {**json.loads(answer)["grammars"][0], "name": "answer"}
    return json.dumps({"grammars": [{"lark_grammar": lead}, named]}, ensure_ascii=False)


def _without_anchors(pattern: str) -> str:
    """The whole output is matched anyway; an anchor would be taken for a character."""
    pattern = pattern.removeprefix("^")
    escapes = len(pattern) - len(pattern.removesuffix("$").rstrip("\\")) - 1
    return pattern[:-1] if pattern.endswith("$") and escapes % 2 == 0 else pattern


def _title(constraint: Constraint) -> str:
    return {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}[constraint.kind]
