"""The vocabulary of a request: what crosses from the API to the engine and back.

Invariants: everything here is plain data without torch, text or HTTP; a `Request` holds token ids only.
`SamplingParams` is validated where it is made (`validate`), so the engine never checks again.
Knows nothing of pages, slots or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stoker_runtime.errors import RequestError

# What a slot's biases on the device have room for, shared out: stoker_kernels.sampling.state.MAX_BIAS in all.
MAX_BIASED = 300
MAX_STOP_IDS = 64
MAX_BAD_TOKENS = 128
MAX_WORD = 64
"""Tokens of one bad word."""


UNMET = "The constraint cannot be met: "
"""How the error of a sequence begins that no token of the model may continue: the request's fault, not the engine's."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ConstraintKind(StrEnum):
    """The languages in which a constraint can be written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole output must match: `text` is a JSON schema, a regular expression, or a grammar (Lark, GBNF).

    `lead` is a Lark grammar of what may come around it, such as reasoning before it, which calls it `@answer`; ""
    for nothing. Whether a constraint can be enforced at all, `sampling.grammar.check` tells.
    """

    kind: ConstraintKind
    text: str
    lead: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `typical_p` 1 switch those filters off.

    `logprobs` is the number of top alternatives to report (None: none at all, 0: the sampled token only).
    `stop_token_ids` are ids after which the sequence ends; EOS ids are added by the engine unless `ignore_eos`.
    `allowed_token_ids`, unless empty, are the only ones there are; `bad_words` are token sequences that the output
    never holds.
    With a `constraint` every token is legal under it, and the sequence ends where it allows nothing more, whatever
    `min_tokens` and `ignore_eos` say.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None

    @property
    def bad_tokens(self) -> tuple[int, ...]:
        """Tokens that are bad words in themselves."""
        return tuple(word[0] for word in self.bad_words if len(word) == 1)

    @property
    def masked(self) -> bool:
        """Whether the host has to say before each token which ones are allowed.

        Bad words of one token alone are a matter of bias, which rests on the device.
        """
        return (
            self.constraint is not None
            or bool(self.allowed_token_ids)
            or len(self.bad_words) > MAX_BAD_TOKENS
            or any(len(word) > 1 for word in self.bad_words)
        )

    def validate(self) -> SamplingParams:
        """Return self, or raise RequestError naming the field and its range."""
        checks = [
            (self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 0"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "between 0 and max_tokens"),
            (0.0 <= self.temperature <= 2.0, "temperature", self.temperature, "between 0 and 2"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "greater than 0 and at most 1"),
            (self.top_k >= -1, "top_k", self.top_k, "at least 1, or 0 or -1 for all tokens"),
            (0.0 < self.typical_p <= 1.0, "typical_p", self.typical_p, "greater than 0 and at most 1"),
            (0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 and 1"),
            (self.repetition_penalty > 0.0, "repetition_penalty", self.repetition_penalty, "greater than 0"),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", self.frequency_penalty, "between -2 and 2"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", self.presence_penalty, "between -2 and 2"),
            (self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", self.logprobs, "between 0 and 20"),
            (len(self.logit_bias) <= MAX_BIASED, "logit_bias", len(self.logit_bias), f"of at most {MAX_BIASED} tokens"),
            (
                len(self.stop_token_ids) <= MAX_STOP_IDS,
                "stop_token_ids",
                len(self.stop_token_ids),
                f"at most {MAX_STOP_IDS} ids",
            ),
            (
                all(0 < len(word) <= MAX_WORD for word in self.bad_words),
                "bad_words",
                max(map(len, self.bad_words), default=0),
                f"of 1 to {MAX_WORD} tokens each",
            ),
        ]
        for good, name, value, rule in checks:
            if not good:
                raise RequestError(f"{name} must be {rule}; got {value}.", param=name)
        return self


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What is done with the vector of a text that is embedded instead of continued.

    `dimensions` cuts it to its first so many (Matryoshka models; None: whole). `normalize` None: as the model does.
    `second_segment` is the token at which the second text of a pair begins (0: there is one text).
    """

    dimensions: int | None = None
    normalize: bool | None = None
    second_segment: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, or with `pooling` one text to turn into a vector.

    A client's `n` choices are `n` requests that share their prompt's pages.
    `priority`: lower runs first (policy `priority`). `arrival` is seconds of the monotonic clock.
    `cache_salt` keeps the prefix cache of one tenant from another. `family`, unless empty, is common to requests with
    the same prompt: one computes it and the others take its pages. What a `session` leaves in the prefix cache
    outlives what is there without one. A text to pool has `params.max_tokens` 0.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    family: str = ""
    session: str = ""
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position: the chosen token's, and the top alternatives best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenOutput:
    """What one step gave one sequence. `tokens` may be empty when only `finish` is news.

    Not frozen, because one is made for every token and freezing triples its cost; nobody changes it.

    `tokens` include the id that ended the sequence, EOS too. `stop_token` is that id when `finish` is STOP by
    a stop id and not EOS. `prompt_logprobs` come in order, once: entry i is of prompt token i + 1 (the first
    has none). `queue_seconds`, from arrival to admission, comes with the first output. `complete`: the sequence
    ended because its constraint allows nothing more; its last token is part of the answer. `vector`: what a pooling
    request asked for, as fp32 in this machine's byte order, one number for a score; it comes with `finish` STOP.
    """

    request_id: str
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    queue_seconds: float | None = None
    error: str | None = None
    complete: bool = False
    vector: bytes | None = None


@dataclass(slots=True)
class EngineStats:
    """One heartbeat of the engine: gauges of now, counters since start. Sent with every step and when idle."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    swapped: int = 0
    host_pages_used: int = 0
    host_pages_total: int = 0
    host_queries: int = 0
    host_hits: int = 0
    pages_swapped_out: int = 0
    pages_swapped_in: int = 0
    step_seconds: float = 0.0
    batch_tokens: int = 0
