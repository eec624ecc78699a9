"""One client request in the engine: its sequences submitted, their tokens turned into text, counted and timed.

Invariants: every choice ends in exactly one delta with a finish reason; a stop string, an abort or an error frees
the sequence in the engine at once; time per token is a few list operations and no new task.
Knows nothing of JSON or HTTP: routes format the deltas.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Protocol

from stoker_runtime.api.generate.engine_client import EngineClient
from stoker_runtime.api.limits.limiter import Charge
from stoker_runtime.errors import DeadlineError, EngineError, RequestError, StokerError, UnavailableError
from stoker_runtime.metrics import ServerMetrics
from stoker_runtime.request import UNMET, FinishReason, Image, Request, SamplingParams, TokenLogprobs, TokenOutput
from stoker_runtime.text.detokenizer import NOTHING, Detokenizer
from stoker_runtime.text.tokenizer import Tokenizer
from stoker_runtime.tracing import SequenceTimes

_serials = count(int.from_bytes(os.urandom(6), "big"))
"""Begun anywhere, so that several API processes of one engine never give the same id, whatever ids clients choose."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as ids, and the `images` among them; `text` only where the client sent text."""

    ids: tuple[int, ...]
    text: str | None = None
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class BeamPlan:
    """A search for the likeliest answers in place of sampling; `stops` end one."""

    length_penalty: float
    stops: frozenset[int]


@dataclass(frozen=True, slots=True)
class Work:
    """What one client request asks of the engine. `label` is the request id that its log lines carry.

    `trace` are the headers of the client's trace. `visible` special tokens are text even where special tokens are
    skipped. Of `n` choices `keep` are answered. `deadline`: seconds that it may take. `interval`: tokens of a choice
    that one event of a stream holds at least. `charge`: what its caller's rate limits were charged for it.
    `operation` is what OpenTelemetry's conventions call the route: chat or text_completion.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    n: int = 1
    keep: int = 1
    beams: BeamPlan | None = None
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    visible: frozenset[int] = NOTHING
    priority: int = 0
    cache_salt: str = ""
    session: str = ""
    adapter: int = 0
    label: str = ""
    trace: tuple[tuple[str, str], ...] = ()
    deadline: float | None = None
    interval: int = 1
    charge: Charge | None = None
    operation: str = "chat"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt with several choices counts once."""
        return sum(len(prompt.ids) for prompt in self.prompts)


@dataclass(slots=True)
class Delta:
    """What one step gave one choice. `stop_reason` is the stop string or stop token id behind `finish` "stop".

    Not frozen, because one is made for every token and freezing triples its cost; nobody changes it.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None
    stop_reason: int | str | None = None


def merge(deltas: Iterable[Delta], work: Work) -> list[Delta]:
    """One delta a choice, by index: everything that `deltas` said of it; of more choices than are kept the best."""
    found: list[list[Delta]] = [[] for _ in range(len(work.prompts) * work.n)]
    for delta in deltas:
        found[delta.index].append(delta)
    merged = [_joined(parts) for parts in found]
    return merged if work.keep == work.n else best_of(merged, work.n, work.keep)


def _joined(parts: Sequence[Delta]) -> Delta:
    """What deltas of one choice say together."""
    return Delta(
        parts[0].index,
        "".join([part.text for part in parts]),
        tuple(chain.from_iterable(part.tokens for part in parts)),
        tuple(chain.from_iterable(part.logprobs for part in parts)),
        tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
        parts[-1].finish,
        parts[-1].stop_reason,
    )


async def gathered(generation: Answers, interval: int) -> list[Delta]:
    """The next news, but no less than `interval` tokens of a choice unless one ends: one delta a choice.

    Empty at the end. Raises what `next` raises.
    """
    found: dict[int, list[Delta]] = {}
    while fresh := await generation.next():
        for delta in fresh:
            found.setdefault(delta.index, []).append(delta)
        ends = any(delta.finish is not None for delta in fresh)
        if ends or any(sum(len(part.tokens) for part in parts) >= interval for parts in found.values()):
            break
    return [_joined(parts) for parts in found.values()]


def best_of(merged: Sequence[Delta], n: int, keep: int) -> list[Delta]:
    """Of each prompt's `n` choices the `keep` with the highest log-probability per token, best first."""
    found: list[Delta] = []
    for start in range(0, len(merged), n):
        ranked = sorted(merged[start : start + n], key=_mean_logprob, reverse=True)
        found += [replace(delta, index=start // n * keep + rank) for rank, delta in enumerate(ranked[:keep])]
    return found


def _mean_logprob(delta: Delta) -> float:
    return sum(entry.logprob for entry in delta.logprobs) / max(len(delta.logprobs), 1)


class Answers(Protocol):
    """The answers to one client request while they come, however they are found."""

    work: Work
    arrival: float
    aborted: StokerError | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt with several choices counts once."""
        ...

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared."""
        ...

    @property
    def times(self) -> list[SequenceTimes]:
        """When each of its sequences waited and ran."""
        ...

    async def next(self) -> list[Delta]:
        """Wait for news; an empty list once there are none any more. Raises EngineError."""
        ...

    def abort(self, reason: str | StokerError = ...) -> None:
        """End what still runs. `aborted` is then what to tell the client."""
        ...


def abort_after(seconds: float | None, abort: Callable[[StokerError], None]) -> asyncio.TimerHandle | None:
    """Call `abort` with a DeadlineError once `seconds` are over; None where time does not matter."""
    if seconds is None:
        return None
    error = DeadlineError(f"The request did not finish within its {seconds:g} seconds.", code="deadline_exceeded")
    return asyncio.get_running_loop().call_later(seconds, abort, error)


def failure(output: TokenOutput) -> StokerError:
    """The error behind an output that ended with one: the request's fault where its constraint cannot be met."""
    reason = output.error or "The engine failed on this request."
    return RequestError(reason, code="constraint_unmet") if reason.startswith(UNMET) else EngineError(reason)


@dataclass(slots=True)
class Choice:
    """The state of one sequence. `index` is prompt · n + choice."""

    index: int
    request_id: str
    prompt: Prompt
    detokenizer: Detokenizer
    tokens: int = 0
    cached_tokens: int = 0
    first_time: float = 0.0
    last_time: float = 0.0
    queued: float = 0.0
    finish: str = ""
    finished: bool = False


class Generation:
    """All sequences of one client request, from submission to the last token."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, metrics: ServerMetrics, work: Work) -> None:
        """Submit everything. Raises CapacityError, UnavailableError or EngineDeadError, and then holds nothing."""
        self.arrival = time.monotonic()
        self.work = work
        self.aborted: StokerError | None = None
        self._engine = engine
        self._metrics = metrics
        self._serial = next(_serials)
        self._choices = [self._choice(tokenizer, index) for index in range(len(work.prompts) * work.n)]
        self._by_id = {choice.request_id: choice for choice in self._choices}
        self._open = len(self._choices)
        self._stream = engine.submit([self._request(choice) for choice in self._choices])
        self._timer = abort_after(work.deadline, self.abort)

    def _choice(self, tokenizer: Tokenizer, index: int) -> Choice:
        work = self.work
        detokenizer = Detokenizer(
            tokenizer,
            work.stops,
            include_stop=work.include_stop,
            skip_special=work.skip_special,
            visible=work.visible,
        )
        return Choice(index, f"{work.label}-{self._serial}-{index}", work.prompts[index // work.n], detokenizer)

    def _request(self, choice: Choice) -> Request:
        work = self.work
        params, sibling = work.params, choice.index % work.n
        if sibling and params.seed is not None:
            params = replace(params, seed=params.seed + sibling)
        return Request(
            id=choice.request_id,
            prompt_token_ids=choice.prompt.ids,
            params=params,
            arrival=self.arrival,
            priority=work.priority,
            cache_salt=work.cache_salt,
            family=f"{work.label}-{self._serial}-{choice.index // work.n}" if work.n > 1 else "",
            session=work.session,
            adapter=work.adapter,
            images=choice.prompt.images,
        )

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        return self._open == 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt with n choices counts once."""
        return self.work.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, of all choices."""
        return sum(choice.tokens for choice in self._choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared, counted once a prompt."""
        return sum(choice.cached_tokens for choice in self._choices[:: self.work.n])

    @property
    def times(self) -> list[SequenceTimes]:
        """When each choice waited and ran."""
        return [
            SequenceTimes(each.queued, each.first_time, each.last_time, len(each.prompt.ids), each.tokens, each.finish)
            for each in self._choices
        ]

    async def next(self) -> list[Delta]:
        """Wait for news and return it; an empty list once every choice has finished or `abort` was called.

        Raises EngineError when the engine failed on one of the sequences, and RequestError when the constraint of one
        cannot be met; the others are aborted then.
        """
        deltas: list[Delta] = []
        while self._open and not deltas:
            outputs = await self._stream.next()
            now = time.monotonic()
            for output in outputs:
                choice = self._by_id[output.request_id]
                if not choice.finished:
                    deltas.append(self._take(choice, output, now))
        return deltas

    def abort(self, reason: str | StokerError = "The request was aborted.") -> None:
        """End what still runs, and let `next` return an empty list. Harmless when nothing runs.

        `aborted` is then what to tell the client: `reason`, where it is a text as UnavailableError.
        """
        running = [choice for choice in self._choices if not choice.finished]
        if running:
            self.aborted = reason if isinstance(reason, StokerError) else UnavailableError(reason)
            self._engine.abort([choice.request_id for choice in running])
            now = time.monotonic()
            for choice in running:
                self._close(choice, FinishReason.ABORT, now)

    def _take(self, choice: Choice, output: TokenOutput, now: float) -> Delta:
        if output.finish is FinishReason.ERROR:
            self._close(choice, FinishReason.ERROR, now)
            self.abort()
            raise failure(output)
        if output.cached_tokens:
            choice.cached_tokens = output.cached_tokens
        finish = output.finish
        stop_reason: int | str | None = output.stop_token
        text, used = self._read(choice, output)
        stopped_by = choice.detokenizer.stopped_by
        if stopped_by is not None:
            if finish is None:
                self._engine.abort([choice.request_id])
            finish, stop_reason = FinishReason.STOP, stopped_by
        elif finish is not None:
            text += choice.detokenizer.finish()
        if used:
            self._time(choice, output, used, now)
        if finish is not None:
            self._close(choice, finish, now)
        tokens, logprobs = output.tokens[:used], output.logprobs[:used]
        return Delta(choice.index, text, tokens, logprobs, output.prompt_logprobs, finish, stop_reason)

    def _read(self, choice: Choice, output: TokenOutput) -> tuple[str, int]:
        """The text that the output makes certain, and how many of its tokens count: those up to a stop string."""
        work, detokenizer, tokens = self.work, choice.detokenizer, output.tokens
        # The id that ended the sequence is counted but is no part of the text.
        silent = output.finish is FinishReason.STOP and not output.complete and not work.include_stop
        spoken = tokens[:-1] if silent else tokens
        if not work.stops:
            choice.tokens += len(tokens)
            return detokenizer.push(spoken), len(tokens)
        text = ""
        for at, token in enumerate(spoken):
            choice.tokens += 1
            text += detokenizer.push((token,), search=choice.tokens >= work.params.min_tokens)
            if detokenizer.stopped_by is not None:
                return text, at + 1
        choice.tokens += len(tokens) - len(spoken)
        return text, len(tokens)

    def _time(self, choice: Choice, output: TokenOutput, tokens: int, now: float) -> None:
        if choice.tokens == tokens:
            self._metrics.first_token(now - self.arrival, output.queue_seconds)
            choice.first_time, choice.queued = now, output.queue_seconds or 0.0
            tokens -= 1
        if tokens:
            self._metrics.inter_token((now - choice.last_time) / tokens if choice.last_time else 0.0, tokens)
        choice.last_time = now

    def _close(self, choice: Choice, finish: FinishReason, now: float) -> None:
        choice.finished, choice.finish = True, finish.value
        self._open -= 1
        if not self._open and self._timer is not None:
            self._timer.cancel()
        self._metrics.request_finished(
            finish, now - self.arrival, choice.last_time - choice.first_time, len(choice.prompt.ids), choice.tokens
        )
