"""Constrained and unconstrained sequences in random schedules: each output is legal, and complete unless it was cut."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.runtime.engine.uniform_executor import UniformExecutor

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import EngineError
from stoker_runtime.request import Constraint, ConstraintKind, FinishReason, Request, SamplingParams
from stoker_runtime.sampling import grammar
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.text.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DIGITS = Constraint(ConstraintKind.REGEX, r"[0-9]{3}-[a-z]{2,5}")
OPEN_END = Constraint(ConstraintKind.REGEX, r"[ab]+")
OPTIONS = grammar.choice(["yes", "no", "maybe not"])
LIST = Constraint(ConstraintKind.GRAMMAR, 'start: "<" item ("," item)* ">"\nitem: /[a-f]{1,2}/')
CONSTRAINTS = [DIGITS, OPEN_END, OPTIONS, LIST, grammar.json_schema(SCHEMA, "")]
VOCAB, EOS = 260, 257


def loop_over(eos: tuple[int, ...] = (EOS,), **sizes: Any) -> StepLoop:
    """A step loop over bytes, the tokenizer of a model without one."""
    sizes = {"vocab_size": VOCAB, "max_num_seqs": 4, **sizes}
    return StepLoop(UniformExecutor(eos_token_ids=eos, **sizes), EngineConfig(model="shape:tiny"))


def params(constraint: Constraint | None, **others: Any) -> SamplingParams:
    return SamplingParams(**{"constraint": constraint, "max_tokens": 60, **others})


@dataclass
class Collected:
    """What came out for each sequence."""

    tokens: dict[Sequence, list[int]] = field(default_factory=dict)
    finished: list[Sequence] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)


def run(loop: StepLoop, into: Collected | None = None) -> Collected:
    """Step until nothing is left, with the integrity check after each step."""
    seen = into or Collected()
    for _ in range(100_000):
        if not loop.has_work:
            break
        take(loop, seen)
    assert not loop.has_work, "no progress"
    return seen


def take(loop: StepLoop, seen: Collected) -> None:
    output = loop.step()
    loop.scheduler.check()
    for sequence, token in zip(output.sequences, output.tokens, strict=True):
        assert sequence not in seen.finished, "a token after the end"
        seen.tokens.setdefault(sequence, []).append(token)
    seen.finished += output.finished
    seen.started += output.started


def text_of(sequence: Sequence, tokens: list[int]) -> str:
    """The answer; ids that ended it are no part of it."""
    if sequence.finish is FinishReason.STOP and not sequence.complete:
        tokens = tokens[:-1]
    return bytes(tokens).decode(errors="replace")


def one(loop: StepLoop, constraint: Constraint, **others: Any) -> tuple[Sequence, str]:
    sequence = loop.add(Request("r", (65, 66), params(constraint, seed=5, **others)))
    seen = run(loop)
    assert seen.finished == [sequence]
    return sequence, text_of(sequence, seen.tokens.get(sequence, []))


@pytest.fixture(scope="module")
def byte_trie() -> LLTokenizer:
    return grammar.build_tokenizer(Tokenizer.synthetic(), VOCAB, (EOS,))


def matches(constraint: Constraint, text: str) -> bool:
    """An opinion of its own, where there is one, on whether `text` is a whole output."""
    if constraint is OPTIONS:
        return text in ("yes", "no", "maybe not")
    if constraint.kind is ConstraintKind.REGEX:
        return re.fullmatch(constraint.text, text) is not None
    if constraint is LIST:
        return re.fullmatch(r"<[a-f]{1,2}(,[a-f]{1,2})*>", text) is not None
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize("eos", [(EOS,), (EOS, 3), ()])
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=["digits", "open", "options", "list", "schema"])
def test_output_matches(constraint: Constraint, eos: tuple[int, ...]) -> None:
    sequence, text = one(loop_over(eos), constraint)
    if sequence.finish is FinishReason.STOP:
        assert matches(constraint, text)
    else:
        # Without an id that ends a text, what can go on for ever does.
        assert sequence.finish is FinishReason.LENGTH
        assert constraint in (OPEN_END, LIST)


def test_random_schedules(byte_trie: LLTokenizer) -> None:
    preemptions = complete = cut = 0
    for seed in range(60):
        rng = random.Random(seed)
        loop = loop_over(
            rng.choice([(EOS,), ()]),
            num_pages=rng.choice([6, 12, 24, 48]),
            page_size=rng.choice([2, 4, 8]),
            max_num_seqs=rng.choice([2, 4, 8]),
            max_model_len=96,
            max_num_batched_tokens=rng.choice([8, 16, 64]),
        )
        executor = loop.executor
        assert isinstance(executor, UniformExecutor)
        seen, sequences = Collected(), []
        for arrival in range(rng.randint(2, 8)):
            constraint = rng.choice([None, *CONSTRAINTS])
            prompt = tuple(rng.randrange(256) for _ in range(rng.choice([1, 5, 11])))
            asked = params(
                constraint,
                seed=seed * 100 + arrival,
                max_tokens=rng.choice([1, 8, 40]),
                ignore_eos=rng.random() < 0.3,
                min_tokens=rng.choice([0, 0, 1]),
                presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            )
            if constraint is None:
                executor.prompts[asked.seed or 0] = prompt
                asked = replace(asked, prompt_logprobs=rng.choice([None, 0]))
            else:
                asked = replace(asked, presence_penalty=0.0)
            family = f"f{arrival}" if rng.random() < 0.4 else ""
            sequences.append(loop.add(Request(f"r{arrival}", prompt, asked, family=family)))
            if family and constraint is not None:
                sibling = replace(asked, seed=seed * 100 + 50 + arrival)
                sequences.append(loop.add(Request(f"s{arrival}", prompt, sibling, family=family)))
            for _ in range(rng.choice([0, 1, 3])):
                take(loop, seen)
            if rng.random() < 0.1:
                loop.abort(rng.choice(sequences))
        run(loop, seen)
        preemptions += loop.stats().preemptions
        assert len(seen.started) == len(set(seen.started)), "started twice"
        for sequence in sequences:
            constraint, tokens = sequence.params.constraint, seen.tokens.get(sequence, [])
            assert sequence.finish is not None
            assert sequence.finish is not FinishReason.ERROR, sequence.error
            if constraint is None:
                continue
            text = text_of(sequence, tokens)
            if sequence.finish is FinishReason.STOP:
                complete += 1
                assert matches(constraint, text), (seed, text)
            else:
                cut += 1
                if sequence.finish is FinishReason.LENGTH:
                    assert len(sequence.tokens) == sequence.limit, "cut before its length"
                matcher = grammar.compile_matcher(constraint, byte_trie)
                assert matcher.try_consume_tokens(tokens) == len(tokens), (seed, text)
    # Masks come when their thread has them, so the number of preemptions is not the same in every run.
    assert preemptions > 0
    assert complete > 40
    assert cut > 10


def test_min_tokens_and_ignore_eos_put_the_end_off() -> None:
    sequence, text = one(loop_over(), OPEN_END, min_tokens=20)
    assert len(text) >= 20
    sequence, text = one(loop_over(), OPEN_END, ignore_eos=True, max_tokens=50)
    assert (sequence.finish, len(text)) == (FinishReason.LENGTH, 50)


def test_complete_grammar_ends_whatever_min_tokens_says() -> None:
    sequence, text = one(loop_over(), OPTIONS, min_tokens=30, ignore_eos=True)
    assert sequence.finish is FinishReason.STOP
    assert sequence.complete
    assert text in ("yes", "no", "maybe not")


def test_stop_token_that_is_text_is_put_off_only_while_there_is_a_choice() -> None:
    wanted = Constraint(ConstraintKind.REGEX, "ab{3}c")
    sequence, text = one(loop_over(), wanted, stop_token_ids=(ord("b"), 250), min_tokens=3)
    assert sequence.finish is FinishReason.STOP
    assert (sequence.stop_token, text) == (ord("b"), "abb")


def test_empty_output() -> None:
    sequence, text = one(loop_over(()), Constraint(ConstraintKind.REGEX, "(|)"))
    assert (sequence.finish, text) == (FinishReason.STOP, "")


@pytest.mark.parametrize("eos", [(3,), (0,), ()])
def test_dead_end_ends_the_sequence_with_a_reason(eos: tuple[int, ...]) -> None:
    # A vocabulary of a hundred bytes ends before the last letter.
    loop = loop_over(eos, vocab_size=100)
    sequence, text = one(loop, Constraint(ConstraintKind.REGEX, "ABz"))
    assert (sequence.finish, text) == (FinishReason.ERROR, "AB")
    assert sequence.error is not None
    assert sequence.error.startswith("The constraint cannot be met: no token of this model may follow")


def test_what_cannot_be_compiled_ends_the_sequence_and_no_other() -> None:
    loop = loop_over()
    bad = loop.add(Request("bad", (1,), params(Constraint(ConstraintKind.REGEX, "["))))
    good = loop.add(Request("good", (1,), params(OPTIONS)))
    run(loop)
    assert bad.finish is FinishReason.ERROR
    assert bad.error is not None
    assert "unclosed character class" in bad.error
    assert good.finish is FinishReason.STOP


def test_other_sequences_run_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    release = threading.Event()
    compile_matcher = grammar.compile_matcher

    def slow(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
        assert release.wait(30)
        return compile_matcher(constraint, tokenizer)

    monkeypatch.setattr(grammar, "compile_matcher", slow)
    loop = loop_over()
    held = loop.add(Request("held", (1,), params(OPTIONS)))
    free = loop.add(Request("free", (1,), params(None, max_tokens=5, ignore_eos=True)))
    while free.finish is None:
        loop.step()
    assert held.slot < 0
    aborted = loop.add(Request("aborted", (1,), params(DIGITS)))
    assert loop.abort(aborted)
    release.set()
    run(loop)
    assert held.finish is FinishReason.STOP


def test_failed_step_forgets_its_grammars() -> None:
    loop = loop_over()
    sequence = loop.add(Request("r", (1,), params(OPEN_END)))
    while not sequence.tokens[1:]:
        loop.step()
    assert loop.fail(EngineError("broken")) == [sequence]
    executor = loop.executor
    assert isinstance(executor, UniformExecutor)
    executor.unread.clear()
    again, text = one(loop, OPTIONS)
    assert again.finish is FinishReason.STOP
    assert text in ("yes", "no", "maybe not")
