"""Beam search over one prompt: which continuations are kept, and which are the best in the end.

Each step extends every live beam by its 2 · width likeliest tokens; a continuation that ends is set aside, the `width`
best of the others live on. As in vLLM a beam's score is the sum of its log-probabilities over its length, prompt
included and the id that ended it not, to the power of `length_penalty`.

Invariants: pure; the log-probabilities are the model's own, so nothing is random. The search is over as soon as no
live beam can still come in among the best.
Knows nothing of engines or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker_runtime.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation: its tokens, `ended_by` included where one of the `stops` ended it."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    ended_by: int | None = None


class BeamSearch:
    """The search after one prompt. Feed `take` until it is `done`."""

    def __init__(
        self, prompt_length: int, width: int, max_tokens: int, *, length_penalty: float = 1.0, stops: frozenset[int]
    ) -> None:
        self.live: tuple[Beam, ...] = (Beam(),)
        self._prompt_length = prompt_length
        self._width = width
        self._max_tokens = max_tokens
        self._penalty = length_penalty
        self._stops = stops
        self._ended: list[Beam] = []

    @property
    def branches(self) -> int:
        """How many alternatives each live beam needs."""
        return 2 * self._width

    @property
    def done(self) -> bool:
        """Whether nothing can change any more."""
        if not self.live or len(self.live[0].tokens) >= self._max_tokens:
            return True
        if len(self._ended) < self._width:
            return False
        best = self.best()
        settled = all(beam.ended_by is not None for beam in best)
        return settled and self.score(best[-1]) >= max(map(self._most, self.live))

    def take(self, found: Sequence[TokenLogprobs]) -> None:
        """Extend each live beam by its alternatives, in the order of `live`."""
        going: list[Beam] = []
        for beam, step in zip(self.live, found, strict=True):
            for rank, (token, logprob) in enumerate(step.top[: self.branches], start=1):
                said = replace(step, logprob=logprob, rank=rank)
                longer = Beam((*beam.tokens, token), (*beam.logprobs, said), beam.total + logprob)
                if token in self._stops:
                    self._ended.append(replace(longer, ended_by=token))
                else:
                    going.append(longer)
        going.sort(key=lambda beam: beam.total, reverse=True)
        self.live = tuple(going[: self._width])

    def best(self) -> list[Beam]:
        """The `width` best, best first."""
        return sorted([*self._ended, *self.live], key=self.score, reverse=True)[: self._width]

    def score(self, beam: Beam) -> float:
        """What beams are ranked by."""
        length = self._prompt_length + len(beam.tokens) - (beam.ended_by is not None)
        return self._scored(beam.total, length)

    def _most(self, beam: Beam) -> float:
        """What a live beam can reach at most: log-probabilities only ever lower the total."""
        shortest, longest = self._prompt_length + len(beam.tokens), self._prompt_length + self._max_tokens
        return max(self._scored(beam.total, shortest), self._scored(beam.total, longest))

    def _scored(self, total: float, length: int) -> float:
        return float(total / length**self._penalty)
