"""Keeps the grammars of constrained sequences in step with their tokens, and writes the masks of the step under way.

    1. take over grammars that were compiled; until then their sequences are held back from admission
    2. advance each grammar by the token that its sequence got
    3. write the mask of each constrained row of the launched step, then let that step sample
    4. end sequences whose grammar is complete, or allows nothing

Invariants: a grammar belongs to a sequence and not to a slot, and it advances when tokens are committed, so that
preemption leaves it as it is. Without constrained sequences a step costs two comparisons.
Knows nothing of devices, text or processes.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker_runtime.engine.executor_protocol import Launched, MaskRows
from stoker_runtime.errors import StokerError
from stoker_runtime.request import Constraint, FinishReason
from stoker_runtime.sampling.grammar import GrammarCompiler, explain
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

WORTH_THREADS = 4
"""Fewer grammars than this advance faster one after the other than by waking threads."""
COMPILE_WAIT_SECONDS = 0.005
"""How long a loop without other work waits for a grammar before it looks for messages again."""


class Constraints:
    """The grammars of all constrained sequences that have not ended."""

    def __init__(self, scheduler: Scheduler, compiler: GrammarCompiler) -> None:
        self._scheduler = scheduler
        self._compiler = compiler
        self._compiling: dict[Sequence, Future[LLMatcher]] = {}
        self._matchers: dict[Sequence, LLMatcher] = {}
        self._threads: LLExecutor | None = None

    def add(self, sequence: Sequence, constraint: Constraint) -> None:
        """A new sequence, held back until its grammar is there."""
        sequence.held = True
        self._compiling[sequence] = self._compiler.start(constraint)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended outside of a step."""
        self._compiling.pop(sequence, None)
        self._matchers.pop(sequence, None)

    def enforce(self, output: StepOutput, launched: Launched | None) -> None:
        """Take in a committed step's tokens, and let the step that runs meanwhile sample under its masks.

        Sequences that end here are added to `output`.
        """
        if self._compiling:
            self._take_over(output, idle=launched is None and not output.sequences)
        if self._matchers:
            self._advance(output)
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
            elif isinstance(error, StokerError):
                self._refuse(sequence, error.message, output)
            else:
                raise error

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
        """The masks of the launched step; rows of unconstrained and ended sequences allow everything."""
        constrained = [
            (sequence, self._matchers[sequence], row)
            for sequence, row in zip(self._scheduler.sampled, masks.rows, strict=True)
            if sequence in self._matchers and sequence.finish is None
        ]
        if not constrained:
            return
        words = masks.words
        assert words.flags.c_contiguous, "rows are addressed by their number"
        self._fill([(matcher, row) for _, matcher, row in constrained], words)
        for sequence, matcher, row in constrained:
            if matcher.is_error() or not words[row].any():
                reason = explain(matcher) or "its vocabulary lacks the text"
                self._refuse(sequence, f"no token of this model may follow ({reason})", output)
            elif not self._bar_ends(sequence, words[row], accepting=matcher.is_accepting()):
                self._complete(sequence, output)

    def _bar_ends(self, sequence: Sequence, words: NDArray[np.int32], *, accepting: bool) -> bool:
        """Clear the ids that must not end the sequence yet; False when nothing else is left and it may end."""
        barred = self._barred(sequence)
        if not barred:
            return True
        index = np.array(barred) // 32
        before = words[index]
        bits = np.left_shift(1, np.array(barred) % 32).astype(np.uint32).view(np.int32)
        np.bitwise_and.at(words, index, ~bits)
        if words.any():
            return True
        if not accepting:
            # A stop id that is text: the grammar wants it now, so it cannot be put off.
            words[index] = before
        return not accepting

    def _barred(self, sequence: Sequence) -> Many[int]:
        params, config = sequence.params, self._scheduler.config
        barred: list[int] = []
        if not config.eos_token_ids:
            barred.append(config.vocab_size - 1)
        if params.ignore_eos:
            barred += config.eos_token_ids
        if len(sequence.tokens) - sequence.prompt_length < params.min_tokens:
            barred += [token for token in sequence.stops if token < config.vocab_size]
        return barred

    def _consume(self, pairs: list[tuple[LLMatcher, int]]) -> list[bool]:
        if len(pairs) < WORTH_THREADS:
            return [matcher.consume_token(token) for matcher, token in pairs]
        return self._pool().consume_token_par(pairs)

    def _fill(self, targets: list[tuple[LLMatcher, int]], words: NDArray[np.int32]) -> None:
        start, size = words.ctypes.data, words.strides[0]
        if len(targets) < WORTH_THREADS:
            for matcher, row in targets:
                matcher.unsafe_compute_mask_ptr(start + row * size, size)
        else:
            self._pool().unsafe_compute_mask_ptr(targets, start, size, len(words))

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
        sequence.error = f"The constraint cannot be met: {message}"
        self._scheduler.end(sequence, FinishReason.ERROR, output)
