"""The records in which what the engine gives comes together, sequence by sequence, until `LLM` gives it back.

Invariants: the texts of a stream, put together, are the text of the whole.
Knows nothing of models and batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stoker_runtime.offline.task import Task
from stoker_runtime.outputs import CompletionOutput, Delta, RequestOutput, Spelling, position_logprobs
from stoker_runtime.request import FinishReason, TokenLogprobs
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.sequence import Sequence as Running

if TYPE_CHECKING:
    from stoker_runtime.text.detokenizer import Detokenizer

STEPS_A_ROUND = 16


class Record:
    """What one sequence gave so far, as text too where that is asked for as it comes."""

    def __init__(self, sequence: Running, detokenizer: Detokenizer | None, *, include_stop: bool = False) -> None:
        """Without a detokenizer there is no text. `include_stop`: the id that ended the sequence is part of it."""
        self._sequence = sequence
        self._include_stop = include_stop
        self._detokenizer = detokenizer
        self._text: list[str] = []
        self._read = 0
        self._shown = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.over = False

    def read(self) -> bool:
        """Read the new tokens; whether a stop string was found in them. What is over has none."""
        sequence, detokenizer = self._sequence, self._detokenizer
        if self.over:
            return False
        if detokenizer is None:
            self.over = sequence.finish is not None
            return False
        fresh = sequence.tokens[sequence.prompt_length + self._read :]
        spoken = fresh[:-1] if self._silent_end else fresh
        if not detokenizer.searches:  # all at once: token by token costs a percent of the whole at 256 streams
            self._read += len(spoken)
            self._text.append(detokenizer.push(spoken))
            spoken = spoken[:0]
        for token in spoken:
            self._read += 1
            self._text.append(detokenizer.push((token,), search=self._read >= sequence.params.min_tokens))
            if detokenizer.stopped_by is not None:
                break
        if sequence.finish is not None or detokenizer.stopped_by is not None:
            self._text.append(detokenizer.finish())
            self.over = True
        return detokenizer.stopped_by is not None

    @property
    def _silent_end(self) -> bool:
        sequence = self._sequence
        return sequence.finish is FinishReason.STOP and not sequence.complete and not self._include_stop

    def delta(self) -> Delta | None:
        """The text since the last delta; None when nothing is certain yet and it goes on."""
        text = "".join(self._text)
        self._text.clear()
        if not text and not self.over:
            return None
        start, self._shown = self._shown, self._given
        finish, stop_reason = self._finish() if self.over else (None, None)
        return Delta(text, self._token_ids[start:], finish, stop_reason)

    def completion(self, index: int, spelling: Spelling | None) -> CompletionOutput:
        """The finished choice."""
        if not self.over:
            self.read()
        finish, stop_reason = self._finish()
        tokens = self._sequence.tokens[self._sequence.prompt_length :].tolist()
        asked = self._sequence.params.logprobs is not None
        logprobs = position_logprobs(tokens, self.logprobs[: len(tokens)], spelling) if asked else None
        return CompletionOutput(index, "".join(self._text), tokens, finish, stop_reason, logprobs)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared."""
        return self._sequence.cached_tokens

    @property
    def _given(self) -> int:
        return len(self._sequence.tokens) - self._sequence.prompt_length

    @property
    def _token_ids(self) -> tuple[int, ...]:
        tokens = self._sequence.tokens[self._sequence.prompt_length :]
        return tuple(tokens)

    def _finish(self) -> tuple[FinishReason, str | int | None]:
        if self._detokenizer is not None and self._detokenizer.stopped_by is not None:
            return FinishReason.STOP, self._detokenizer.stopped_by
        sequence = self._sequence
        assert sequence.finish is not None, "the sequence goes on"
        if sequence.finish is FinishReason.LENGTH and self._given < sequence.params.max_tokens:
            return sequence.finish, "max_model_len"
        return sequence.finish, sequence.stop_token


class Rounds:
    """Reads some records after each step, in turn, while the device works on the next one: little is left at the end.

    All of it at the end would be time in which the device waits, and a token at a time costs ten times as much.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._turn = itertools.cycle(range(STEPS_A_ROUND))

    def step(self) -> None:
        """Read the records whose turn it is."""
        for record in self._records[next(self._turn) :: STEPS_A_ROUND]:
            record.read()


def gather(output: StepOutput, records: Mapping[Running, Record], *, search: bool) -> list[Running]:
    """Hand a step's outcome to its records; with `search`, the sequences whose text reached a stop string."""
    for sequence, entry in zip(output.sequences, output.logprobs, strict=bool(output.logprobs)):
        if entry is not None and sequence in records:
            records[sequence].logprobs.append(entry)
    for sequence, entries in output.prompt_logprobs:
        if sequence in records:
            records[sequence].prompt_logprobs += entries
    if not search:
        return []
    touched = dict.fromkeys((*output.sequences, *output.finished))
    return [each for each in touched if each in records and records[each].read()]


def as_output(task: Task, records: list[Record], spelling: Spelling) -> RequestOutput:
    """The finished generation of a task."""
    first = records[0]
    spelled = spelling if task.detokenize else None
    prompt_logprobs = None
    if task.params.prompt_logprobs is not None:
        prompt_logprobs = [None, *position_logprobs(task.ids[1:], first.prompt_logprobs, spelled)]
    return RequestOutput(
        request_id=task.name,
        prompt=task.text,
        prompt_token_ids=list(task.ids),
        outputs=[record.completion(index, spelled) for index, record in enumerate(records)],
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=first.cached_tokens,
    )
