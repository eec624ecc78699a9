"""What `LLM` gives back: finished generations, pieces of a stream, and the records in which they come together.

Invariants: the texts of a stream, put together, are the text of the whole.
Knows nothing of models and batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_runtime.request import FinishReason, SamplingParams, TokenLogprobs
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.sequence import Sequence as Running

if TYPE_CHECKING:
    from stoker_runtime.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice. `token_ids` include the id that ended it; `text` does not.

    `stop_reason` is the stop string or stop id that ended it, if one did and it was not EOS; "max_model_len" where the
    context was full before `max_tokens` were out.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def finish_reason(self) -> str:
        """Why it ended, as the API says it: "stop" or "length"."""
        return self.finish.value

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of its tokens' log-probabilities, where they were asked for."""
        return sum(entry.logprob for entry in self.logprobs) if self.logprobs else None


@dataclass(frozen=True, slots=True)
class Output:
    """What came of one prompt: its choices in `outputs`; the first one's fields also stand here.

    `prompt` is the text that was given, or the chat template made. `prompt_logprobs[i]` is of prompt token i + 1.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """True: only finished generations are returned."""
        return True

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared; vLLM's name."""
        return self.cached_tokens

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.outputs[0].token_ids

    @property
    def finish(self) -> FinishReason:
        """Why the first choice ended."""
        return self.outputs[0].finish

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the first choice."""
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the first choice's tokens."""
        return self.outputs[0].logprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream gave since the last one. The last has `finish` set."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be done for one prompt: `n` sequences, and how their tokens become text."""

    name: str
    text: str | None
    ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    detokenize: bool = True


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
        """Read the new tokens; whether a stop string was found in them."""
        sequence, detokenizer = self._sequence, self._detokenizer
        if detokenizer is None:
            self.over = sequence.finish is not None
            return False
        fresh = sequence.tokens[sequence.prompt_length + self._read :]
        spoken = fresh[:-1] if self._silent_end else fresh
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
        start, self._shown = self._shown, len(self._token_ids)
        finish, stop_reason = self._finish() if self.over else (None, None)
        return Delta(text, self._token_ids[start:], finish, stop_reason)

    def completion(self, index: int) -> Completion:
        """The finished choice."""
        if not self.over:
            self.read()
        finish, stop_reason = self._finish()
        logprobs = tuple(self.logprobs[: len(self._token_ids)])
        return Completion(index, "".join(self._text), self._token_ids, finish, stop_reason, logprobs)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared."""
        return self._sequence.cached_tokens

    @property
    def _token_ids(self) -> tuple[int, ...]:
        tokens = self._sequence.tokens[self._sequence.prompt_length :]
        return tuple(tokens)

    def _finish(self) -> tuple[FinishReason, str | int | None]:
        if self._detokenizer is not None and self._detokenizer.stopped_by is not None:
            return FinishReason.STOP, self._detokenizer.stopped_by
        sequence = self._sequence
        assert sequence.finish is not None, "the sequence goes on"
        if sequence.finish is FinishReason.LENGTH and len(self._token_ids) < sequence.params.max_tokens:
            return sequence.finish, "max_model_len"
        return sequence.finish, sequence.stop_token


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


def as_output(task: Task, records: list[Record]) -> Output:
    """The finished generation of a task."""
    first = records[0]
    completions = tuple(record.completion(index) for index, record in enumerate(records))
    return Output(
        request_id=task.name,
        prompt=task.text,
        prompt_token_ids=task.ids,
        outputs=completions,
        prompt_logprobs=tuple(first.prompt_logprobs),
        cached_tokens=first.cached_tokens,
    )
