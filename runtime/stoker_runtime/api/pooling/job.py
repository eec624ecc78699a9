"""The texts of one client request in the engine: encoded, submitted together, and their vectors.

Invariants: everything is checked before anything is submitted; whatever ends a job, nothing of it stays in the engine.
Vectors come in the order of their texts.
Knows nothing of JSON or of how answers look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count

from starlette.types import Receive

from stoker_runtime.api.answering.prompts import a_part, off_loop, too_long
from stoker_runtime.api.answering.state import ServerState, Service
from stoker_runtime.api.generate.engine_client import EngineClient
from stoker_runtime.api.generate.generation import abort_after
from stoker_runtime.api.generate.sampling import check_ids
from stoker_runtime.api.http.caller import Caller
from stoker_runtime.api.http.sse import abort_on_disconnect
from stoker_runtime.api.pooling.bodies import PoolingFields
from stoker_runtime.errors import CapacityError, EngineError, RequestError, StokerError, UnavailableError
from stoker_runtime.metrics import ServerMetrics
from stoker_runtime.request import FinishReason, PoolingParams, Request, SamplingParams
from stoker_runtime.text.pairs import encode_pair
from stoker_runtime.text.tokenizer import Encoded

CALL_CHARACTERS = 64
"""Of a text, that take as long as the call that encodes it."""
_serials = count()
_NO_TOKENS = SamplingParams(max_tokens=0)


@dataclass(frozen=True, slots=True)
class PoolingWork:
    """What one client request asks of the engine. `label` is the request id that its log lines carry.

    `deadline`: seconds that it may take.
    """

    texts: tuple[Encoded, ...]
    params: PoolingParams
    priority: int = 0
    label: str = ""
    deadline: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.ids) for text in self.texts)


class PoolingJob:
    """All texts of one client request, from submission to the last vector."""

    def __init__(self, engine: EngineClient, metrics: ServerMetrics, work: PoolingWork) -> None:
        """Submit everything. Raises CapacityError, UnavailableError or EngineDeadError, and then holds nothing."""
        self.arrival = time.monotonic()
        self.work = work
        self.aborted: StokerError | None = None
        self._engine = engine
        self._metrics = metrics
        serial = next(_serials)
        self._open = {f"{work.label}-{serial}-{at}": at for at in range(len(work.texts))}
        self._stream = engine.submit([self._request(name, at) for name, at in self._open.items()])
        self._timer = abort_after(work.deadline, self.abort)

    def _request(self, name: str, at: int) -> Request:
        text, work = self.work.texts[at], self.work
        return Request(
            id=name,
            prompt_token_ids=tuple(text.ids),  # no copy: it is one
            params=_NO_TOKENS,
            arrival=self.arrival,
            priority=work.priority,
            pooling=replace(work.params, second_segment=text.second),
        )

    async def vectors(self, receive: Receive) -> list[bytes]:
        """Every text's vector, fp32. A client that goes away ends the job.

        Raises EngineError when the engine failed on one of them, RequestError for what the engine refused,
        what it was aborted with otherwise.
        """
        found: list[bytes] = [b""] * len(self.work.texts)
        async with abort_on_disconnect(receive, self):
            while self._open:
                for output in await self._stream.next():
                    at = self._open.pop(output.request_id, None)
                    if at is None:
                        continue
                    self._count(at, output.finish or FinishReason.ERROR)
                    if output.queue_seconds is not None:
                        self._metrics.queued(output.queue_seconds)
                    if output.finish is FinishReason.ERROR:
                        raise EngineError(output.error or "The engine failed on this request.")
                    found[at] = output.vector or b""
        if self.aborted is not None:
            raise self.aborted
        return found

    def abort(self, reason: str | StokerError = "The request was aborted.") -> None:
        """End what still runs. Harmless when nothing runs."""
        if self._timer is not None:
            self._timer.cancel()
        if self._open:
            self.aborted = reason if isinstance(reason, StokerError) else UnavailableError(reason)
            # Their streams answer with ABORT, which is what lets `vectors` go on.
            self._engine.abort(list(self._open))

    def _count(self, at: int, reason: FinishReason) -> None:
        tokens = len(self.work.texts[at].ids)
        self._metrics.request_finished(reason, time.monotonic() - self.arrival, 0.0, tokens, 0)


@contextmanager
def open_job(state: ServerState, service: Service, work: PoolingWork, caller: Caller) -> Iterator[PoolingJob]:
    """A job that is aborted if it is left before its end, charged to the caller's rate limits.

    Raises what PoolingJob and RateLimiter.admit raise.
    """
    if len(work.texts) > state.config.engine.max_queued:
        raise RequestError(
            f"The request holds {len(work.texts)} texts; this server's queue holds {state.config.engine.max_queued} "
            "(--max-queued). Send fewer."
        )
    limiter = state.limiter
    charge = limiter.admit(caller.owner, work.prompt_tokens, caller.answer_headers) if limiter is not None else None
    try:
        job = _submitted(state, service, work)
        with state.under_way(job):
            yield job
    except (CapacityError, EngineError):
        if charge is not None:
            charge.close(0, failed=True)
        raise


def _submitted(state: ServerState, service: Service, work: PoolingWork) -> PoolingJob:
    try:
        return PoolingJob(service.engine, state.metrics, work)
    except CapacityError as error:
        if not isinstance(error, UnavailableError):
            state.metrics.request_rejected()
        raise


class TextEncoder:
    """Turns the texts of one body into token ids that fit the model. `field` is what errors name."""

    def __init__(self, service: Service, body: PoolingFields) -> None:
        """Raises RequestError for a truncation that the model cannot hold."""
        self._service = service
        self._special = body.add_special_tokens is not False
        longest, limit = service.limits.max_model_len, body.truncate_prompt_tokens
        if limit is not None and limit != -1 and not 0 < limit <= longest:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or between 1 and {longest}; got {limit}.",
                param="truncate_prompt_tokens",
            )
        self._limit = longest if limit == -1 else limit

    async def encode(self, inputs: Sequence[str | list[int]], field: str, prompt: str = "") -> list[Encoded]:
        """Texts, behind `prompt`, and token ids as they came. Raises RequestError for one that is empty, too long or
        no token.
        """
        inputs = [f"{prompt}{given}" if isinstance(given, str) and given else given for given in inputs]

        def encode_all() -> list[Encoded]:
            for given in inputs:
                if not isinstance(given, str):
                    check_ids(field, given, self._service.limits.vocab_size)
            return [self._checked(self._one(given, field), field) for given in inputs]

        return await off_loop(sum(map(len, inputs)) + CALL_CHARACTERS * len(inputs), encode_all)

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], field: str, instruction: str | None = None
    ) -> list[Encoded]:
        """Pairs of texts as one input each, joined as the tokenizer joins them, or within the model's prompt.

        Raises RequestError for an instruction to a model that is given none.
        """
        pooling = self._service.pooling
        prompt = None if pooling is None else pooling.pair_prompt
        if instruction is not None and prompt is None:
            raise RequestError("This model scores pairs without an instruction; leave it out.", param="instruction")
        tokenizer, change = self._service.tokenizer, self._change
        size = sum(len(one) + len(two) + CALL_CHARACTERS for one, two in pairs)

        def encode_all() -> list[Encoded]:
            # One text may be in thousands of pairs. No more is kept of it than may stay of a pair.
            kept = {text: self._part(change(text), field) for text in dict.fromkeys(chain.from_iterable(pairs))}
            special, limit = self._special, self._limit
            found = [
                encode_pair(tokenizer, prompt, kept[one], kept[two], instruction, special=special, limit=limit)
                for one, two in pairs
            ]
            return [self._checked(text, field) for text in found]

        return await off_loop(size, encode_all)

    @property
    def _change(self) -> Callable[[str], str]:
        """What the model's files ask to be done to a text first."""
        pooling = self._service.pooling
        return str.lower if pooling is not None and pooling.lower_case else str

    def _one(self, given: str | list[int], field: str) -> Encoded:
        if isinstance(given, str):
            text = self._part(self._change(given), field)
            return self._service.tokenizer.encode_texts(text, None, self._special, self._limit)
        return Encoded(given if self._limit is None else given[: self._limit])

    def _part(self, text: str, field: str) -> str:
        """What of a long text is kept; all of another. Raises RequestError where a text must not be cut."""
        longest = self._service.limits.max_model_len
        part = a_part(self._service.tokenizer, text, self._special, self._limit or longest)
        if part is None:
            return text
        if self._limit is None:
            raise too_long(longest, len(part[1]), field)
        return part[0]

    def _checked(self, text: Encoded, field: str) -> Encoded:
        longest = self._service.limits.max_model_len
        if not text.ids:
            raise RequestError(f"{field} holds an empty text.", param=field)
        if len(text.ids) > longest:
            raise RequestError(
                f"This model's maximum context length is {longest} tokens. However, you requested {len(text.ids)} "
                "tokens in the input. Shorten it, or set truncate_prompt_tokens.",
                param=field,
                code="context_length_exceeded",
            )
        # As requests hold them: made here, beside the event loop.
        return Encoded(tuple(text.ids), text.second)


def make_pooling_work(
    service: Service, body: PoolingFields, texts: Sequence[Encoded], params: PoolingParams, label: str
) -> PoolingWork:
    """The work that `body` asks for. Raises RequestError for a priority that the server does not know."""
    if body.priority and not service.limits.priorities:
        raise RequestError("priority needs a server that runs with --scheduling-policy priority.", param="priority")
    return PoolingWork(tuple(texts), params, body.priority or 0, label, body.timeout)
