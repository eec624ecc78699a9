"""One client request answered by beam search: each step is a request of one token for each live beam.

Invariants: what beams have in common is computed once, as far as it fills pages of the prefix cache; an abort frees
what is in the engine at once. All answers come together, at the end.
Knows nothing of how beams are ranked, of JSON or of HTTP.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from stoker_runtime.api.generate.engine_client import EngineClient
from stoker_runtime.api.generate.generation import Delta, Prompt, Work, abort_after, failure
from stoker_runtime.errors import StokerError, UnavailableError
from stoker_runtime.metrics import ServerMetrics
from stoker_runtime.request import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from stoker_runtime.sampling.beam import Beam, BeamSearch
from stoker_runtime.text.detokenizer import Detokenizer
from stoker_runtime.text.tokenizer import Tokenizer
from stoker_runtime.tracing import SequenceTimes

_serials = count(int.from_bytes(os.urandom(6), "big"))
"""Begun anywhere, so that several API processes of one engine never give the same id, whatever ids clients choose."""


class BeamGeneration:
    """All searches of one client request."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, metrics: ServerMetrics, work: Work) -> None:
        assert work.beams is not None, "what samples is a Generation"
        self.work = work
        self.aborted: StokerError | None = None
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self.arrival = time.monotonic()
        self._first = self._queued = 0.0
        self._plan = work.beams
        self._searches = [
            BeamSearch(
                len(prompt.ids),
                work.n,
                work.params.max_tokens,
                length_penalty=self._plan.length_penalty,
                stops=self._plan.stops,
            )
            for prompt in work.prompts
        ]
        self._name = f"{work.label}-beam{next(_serials)}"
        self._steps = 0
        self._open: set[str] = set()
        self._cached = 0
        self._completed = 0
        self._over = False
        self._timer = abort_after(work.deadline, self.abort)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return self.work.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answers."""
        return self._completed

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared the first step."""
        return self._cached

    @property
    def times(self) -> list[SequenceTimes]:
        """The search as one sequence."""
        end, finish = time.monotonic(), "abort" if self.aborted is not None else "stop" if self._over else ""
        return [SequenceTimes(self._queued, self._first, end, self.prompt_tokens, self._completed, finish)]

    async def next(self) -> list[Delta]:
        """Search to the end and return every answer; the second time nothing. Raises EngineError and CapacityError."""
        if self._over:
            return []
        while self.aborted is None and (going := [search for search in self._searches if not search.done]):
            await self._step(going)
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self.aborted is not None:
            self._count(FinishReason.ABORT)
            return []
        deltas = [self._delta(index, beam) for index, beam in enumerate(self._best())]
        self._completed = sum(len(delta.tokens) for delta in deltas)
        self._count(FinishReason.STOP)
        return deltas

    def _count(self, reason: FinishReason) -> None:
        """Tell the metrics how it ended, once a prompt."""
        now, share = time.monotonic(), self._completed // len(self.work.prompts)
        for prompt in self.work.prompts:
            generating = now - self._first if self._first else 0.0
            self._metrics.request_finished(reason, now - self.arrival, generating, len(prompt.ids), share)

    def abort(self, reason: str | StokerError = "The request was aborted.") -> None:
        """End the search; harmless when it is over."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._over:
            self.aborted = reason if isinstance(reason, StokerError) else UnavailableError(reason)
            self._engine.abort(list(self._open))

    async def _step(self, going: Sequence[BeamSearch]) -> None:
        """One more token for every live beam."""
        requests = [
            self._request(number, prompt, beam, search)
            for number, (prompt, search) in enumerate(zip(self.work.prompts, self._searches, strict=True))
            if search in going
            for beam in search.live
        ]
        found = await self._run(requests)
        if self.aborted is not None:
            return
        at = 0
        for search in going:
            size = len(search.live)
            search.take(found[at : at + size])
            at += size

    def _request(self, number: int, prompt: Prompt, beam: Beam, search: BeamSearch) -> Request:
        self._steps += 1
        asked = max(search.branches, self.work.params.logprobs or 0)
        return Request(
            id=f"{self._name}-{number}-{self._steps}",
            prompt_token_ids=prompt.ids + beam.tokens,
            params=SamplingParams(max_tokens=1, temperature=0.0, logprobs=asked, ignore_eos=True),
            arrival=self.arrival,
            priority=self.work.priority,
            cache_salt=self.work.cache_salt,
            session=self.work.session,
            adapter=self.work.adapter,
            images=prompt.images,
        )

    async def _run(self, requests: Sequence[Request]) -> list[TokenLogprobs]:
        stream = self._engine.submit(requests)
        found: dict[str, TokenLogprobs] = {}
        self._open = {request.id for request in requests}
        while self._open:
            for output in await stream.next():
                self._take(output, found)
        return [found[request.id] for request in requests] if self.aborted is None else []

    def _take(self, output: TokenOutput, found: dict[str, TokenLogprobs]) -> None:
        if output.finish is FinishReason.ERROR:
            self._open.discard(output.request_id)
            self.abort()
            raise failure(output)
        if not self._first:
            self._first, self._queued = time.monotonic(), output.queue_seconds or 0.0
            self._metrics.first_token(self._first - self.arrival, output.queue_seconds)
        if self._steps <= len(self._searches):
            self._cached += output.cached_tokens
        if output.logprobs:
            found[output.request_id] = output.logprobs[0]
        if output.finish is not None:
            self._open.discard(output.request_id)

    def _best(self) -> list[Beam]:
        return [beam for search in self._searches for beam in search.best()]

    def _delta(self, index: int, beam: Beam) -> Delta:
        work, eos = self.work, beam.ended_by is not None
        spoken = beam.tokens[:-1] if eos and not work.include_stop else beam.tokens
        detokenizer = Detokenizer(self._tokenizer, skip_special=work.skip_special, visible=work.visible)
        text = detokenizer.push(spoken) + detokenizer.finish()
        top = work.params.logprobs or 0
        logprobs = tuple(replace(entry, top=entry.top[:top]) for entry in beam.logprobs)
        stop_reason = beam.ended_by if beam.ended_by in work.params.stop_token_ids else None
        finish = FinishReason.STOP if eos else FinishReason.LENGTH
        return Delta(index, text, beam.tokens, logprobs, finish=finish, stop_reason=stop_reason)
