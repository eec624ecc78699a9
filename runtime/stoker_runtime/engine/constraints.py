"""Keeps the grammars of masked sequences in step with their tokens, and writes the masks of the step under way.

    1. take over grammars that were compiled; until then their sequences are held back from admission
    2. advance each grammar by the token that its sequence got
    3. write the mask of each masked row of the launched step, by its grammar and the request's own rules, then let
       that step sample
    4. end sequences whose grammar is complete, or allows nothing

Invariants: a grammar belongs to a sequence and not to a slot, and it advances when tokens are committed, so that
preemption leaves it as it is. Without masked sequences a step costs three comparisons.
Knows nothing of devices, text or processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

import numpy as np

from stoker_runtime.engine.executor_protocol import Launched
from stoker_runtime.errors import StokerError
from stoker_runtime.request import MAX_WORD, UNMET, FinishReason
from stoker_runtime.sampling.grammar import GrammarCompiler, explain
from stoker_runtime.sampling.token_rules import TokenRules, Words, clear
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.result import MaskRows

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

WORTH_THREADS = 4
"""Fewer grammars than this advance faster one after the other than by waking threads."""
COMPILE_WAIT_SECONDS = 0.005
"""How long a loop without other work waits for a grammar before it looks for messages again."""

log = logging.getLogger(__name__)


class Constraints:
    """The grammars and rules of all masked sequences that have not ended."""

    def __init__(self, scheduler: Scheduler, compiler: GrammarCompiler) -> None:
        self._scheduler = scheduler
        self._compiler = compiler
        self._compiling: dict[Sequence, Future[LLMatcher]] = {}
        self._matchers: dict[Sequence, LLMatcher] = {}
        self._rules: dict[Sequence, TokenRules] = {}
        self._threads: LLExecutor | None = None

    def add(self, sequence: Sequence) -> None:
        """A new sequence that is masked; held back until its grammar is there, if it has one."""
        params = sequence.params
        if params.constraint is not None:
            sequence.held = True
            self._compiling[sequence] = self._compiler.start(params.constraint)
        if params.allowed_token_ids or params.bad_words:
            self._rules[sequence] = TokenRules(params, self._scheduler.config.vocab_size)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended outside of a step."""
        self._compiling.pop(sequence, None)
        self._matchers.pop(sequence, None)
        self._rules.pop(sequence, None)

    def enforce(self, output: StepOutput, launched: Launched | None) -> None:
        """Take in a committed step's tokens, and let the step that runs meanwhile sample under its masks.

        Sequences that end here are added to `output`.
        """
        if self._compiling:
            self._take_over(output, idle=launched is None and not output.sequences)
        if self._matchers:
            self._advance(output)
        for sequence in [each for each in self._rules if each.finish is not None]:
            del self._rules[sequence]
        if launched is not None and launched.masks is not None:
            self._write(launched.masks, output)
            launched.sample()

    def _take_over(self, output: StepOutput, *, idle: bool) -> None:
        if idle:
            wait(self._compiling.values(), COMPILE_WAIT_SECONDS, FIRST_COMPLETED)
        for sequence, compiling in list(self._compiling.items()):
            if not compiling.done():
                continue
            del self._compiling[sequence]
            error = compiling.exception()
            if error is None:
                self._matchers[sequence] = compiling.result().deep_copy()
                sequence.held = False
            else:
                self._refuse(sequence, _why(sequence, error), output)

    def _advance(self, output: StepOutput) -> None:
        matchers = self._matchers
        for sequence in [each for each in matchers if each.finish is not None]:
            del matchers[sequence]
        got = zip(output.sequences, output.tokens, strict=True)
        pairs = [(sequence, token) for sequence, token in got if sequence in matchers]
        if not pairs:
            return
        taken = self._consume([(matchers[sequence], token) for sequence, token in pairs])
        for (sequence, token), legal in zip(pairs, taken, strict=True):
            if not legal or matchers[sequence].is_error():
                self._refuse(sequence, f"it ended at token {token}: {explain(matchers[sequence])}", output)
            elif matchers[sequence].is_stopped():
                self._complete(sequence, output)

    def _write(self, masks: MaskRows, output: StepOutput) -> None:
        """The masks of the launched step; rows of sequences that are not masked, or ended, allow everything."""
        matchers, rules, words = self._matchers, self._rules, masks.words
        masked = [
            (sequence, row)
            for sequence, row in zip(self._scheduler.sampled, masks.rows, strict=True)
            if (sequence in matchers or sequence in rules) and sequence.finish is None
        ]
        if not masked:
            return
        assert words.flags.c_contiguous, "rows are addressed by their number"
        self._fill([(matchers[sequence], row) for sequence, row in masked if sequence in matchers], words)
        for sequence, row in masked:
            if sequence in rules:
                known = sequence.tokens
                rules[sequence].apply(words[row], known[max(sequence.prompt_length, len(known) - MAX_WORD) :])
            matcher = matchers.get(sequence)
            accepting = matcher is not None and matcher.is_accepting()
            failed = matcher is not None and matcher.is_error()
            if failed or not (accepting or words[row].any()):
                self._refuse(sequence, f"no token of this model may follow ({self._blame(sequence)})", output)
            elif not (words[row].any() and self._bar_ends(sequence, words[row], accepting=accepting)):
                self._complete(sequence, output)

    def _blame(self, sequence: Sequence) -> str:
        """Why nothing may follow."""
        matcher = self._matchers.get(sequence)
        reason = explain(matcher) if matcher is not None else ""
        if reason:
            return reason
        if sequence in self._rules:
            return "allowed_token_ids and bad_words leave none of those that the constraint allows"
        return "its vocabulary lacks the text"

    def _bar_ends(self, sequence: Sequence, words: Words, *, accepting: bool) -> bool:
        """Clear the ids that must not end the sequence yet; False when nothing else is left and it may end."""
        barred = self._barred(sequence)
        if not barred:
            return True
        before = words.copy()
        clear(words, np.array(barred))
        if words.any():
            return True
        if not accepting:
            # A stop id that is text: the grammar wants it now, so it cannot be put off.
            words[:] = before
        return not accepting

    def _barred(self, sequence: Sequence) -> Many[int]:
        params, config = sequence.params, self._scheduler.config
        barred: list[int] = []
        # Where there is no grammar, EOS is but a token to a sequence that ignores it.
        if sequence in self._matchers and not config.eos_token_ids:
            barred.append(config.vocab_size - 1)
        elif sequence in self._matchers and params.ignore_eos:
            barred += config.eos_token_ids
        if len(sequence.tokens) - sequence.prompt_length < params.min_tokens:
            barred += [token for token in sequence.stops if token < config.vocab_size]
        return barred

    def _consume(self, pairs: list[tuple[LLMatcher, int]]) -> list[bool]:
        if len(pairs) < WORTH_THREADS:
            return [matcher.consume_token(token) for matcher, token in pairs]
        return self._pool().consume_token_par(pairs)

    def _fill(self, targets: list[tuple[LLMatcher, int]], words: Words) -> None:
        start, size = words.ctypes.data, words.strides[0]
        if len(targets) < WORTH_THREADS:
            for matcher, row in targets:
                matcher.unsafe_compute_mask_ptr(start + row * size, size)
        else:
            self._pool().unsafe_compute_mask_ptr(targets, start, size, len(words))
        # Bits beyond the vocabulary may be set, and a row with nothing else would not look empty.
        if beyond := self._scheduler.config.vocab_size % 32:
            words[[row for _, row in targets], -1] &= np.int32((1 << beyond) - 1)

    def _pool(self) -> LLExecutor:
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = LLExecutor()
        return self._threads

    def _complete(self, sequence: Sequence, output: StepOutput) -> None:
        sequence.complete = True
        self.forget(sequence)
        self._scheduler.end(sequence, FinishReason.STOP, output)

    def _refuse(self, sequence: Sequence, message: str, output: StepOutput) -> None:
        self.forget(sequence)
        sequence.error = f"{UNMET}{message}"
        self._scheduler.end(sequence, FinishReason.ERROR, output)


def _why(sequence: Sequence, error: BaseException) -> str:
    """Why a grammar was not compiled. A defect of the compiler, a panic too, costs the request that met it."""
    if isinstance(error, StokerError):
        return error.message
    log.error("the constraint of %s broke its compiler", sequence.request.id, exc_info=error)
    return f"its compiler broke on it: {type(error).__name__}: {error}"
