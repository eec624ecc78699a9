"""What `LLM` gives back, under vLLM's names and in its shapes.

Invariants: plain data. The texts of a stream's deltas, put together, are the text of the whole.
Knows nothing of models, batches or tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker_runtime.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position. `rank`: 1 for the likeliest. `decoded_token`: its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Spelling = Callable[[int], str]
"""From a token to its text."""


def by_token(token: int, found: TokenLogprobs, spelling: Spelling | None) -> dict[int, Logprob]:
    """One position: the token itself first, then the likeliest, best first. Without a spelling there are no texts."""
    ranked = {token: (found.logprob, found.rank)}
    for rank, (other, logprob) in enumerate(found.top, start=1):
        ranked.setdefault(other, (logprob, rank))
    return {
        other: Logprob(logprob, rank, spelling(other) if spelling else None)
        for other, (logprob, rank) in ranked.items()
    }


def position_logprobs(
    tokens: Sequence[int], found: Sequence[TokenLogprobs], spelling: Spelling | None
) -> list[dict[int, Logprob]]:
    """`by_token` for each of `tokens`."""
    return [by_token(token, entry, spelling) for token, entry in zip(tokens, found, strict=True)]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished choice. `token_ids` include the id that ended it; `text` does not.

    `logprobs[i]` maps tokens to their log-probabilities where token i was chosen: that token first, then the likeliest;
    None where none were asked for. `stop_reason` is the stop string or stop id that ended it, if one did and it was not
    EOS; "max_model_len" where the context was full before `max_tokens` were out.
    """

    index: int
    text: str
    token_ids: list[int]
    finish: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def finish_reason(self) -> str:
        """Why it ended, as the API says it: "stop" or "length"."""
        return self.finish.value

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of its tokens' log-probabilities, where they were asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came of one prompt: its choices in `outputs`; the first one's text and tokens also stand here.

    `prompt` is the text that was given, or the chat template made. `prompt_logprobs[i]` is of prompt token i, and None
    for the first, which nothing foretells; None in all where they were not asked for. `num_cached_tokens`: prompt
    tokens that the prefix cache spared.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """True: only finished generations are returned."""
        return True

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first choice's tokens."""
        return self.outputs[0].token_ids


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream gave since the last one. The last has `finish` set."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam. `tokens` and `text` begin with the prompt; `logprobs` are of what was added to it.

    `cum_logprob` is the sum that the beam is ranked by, before its length counts.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one text."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]

    @property
    def finished(self) -> bool:
        """True: only finished requests are returned."""
        return True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """One score."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of one pair. `prompt_token_ids` are those of the pair, or of both texts one after the other."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]

    @property
    def finished(self) -> bool:
        """True: only finished requests are returned."""
        return True
