"""The vocabulary of a request: what crosses from the API to the engine and back.

Invariants: everything here is plain data without torch, text or HTTP; a `Request` holds token ids only.
`SamplingParams.validate` says what no model could do; what this model cannot, `scheduler.limits` says. Both are asked
where a request is made, for its answer, and once more at the engine's door, for the engine's life.
Knows nothing of pages, slots or kernels.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from numbers import Integral, Real

from stoker_runtime.errors import RequestError

# What a slot's biases on the device have room for, shared out: `MAX_ADJUSTED` in all.
MAX_BIASED = 300
MAX_STOP_IDS = 64
MAX_BAD_TOKENS = 128
MAX_WORD = 64
"""Tokens of one bad word."""
MAX_ADJUSTED = 512
"""What a slot holds of them together, the ids that end a sequence and may not come yet included."""
MAX_LOGPROBS = 20
MAX_BIAS = 1e30
MAX_REPETITION = 1e4
"""Beyond these, products and sums of logits leave the range of fp32."""


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
        for name in _INTEGERS:
            _require_integer(name, getattr(self, name))
        for name in _OPTIONAL_INTEGERS:
            if getattr(self, name) is not None:
                _require_integer(name, getattr(self, name))
        for name in _NUMBERS:
            _require_number(name, getattr(self, name))
        for name in _LISTS:
            _require_list(name, getattr(self, name))
        for name, holds, rule in _RULES:
            if not holds(self):
                value = getattr(self, name)
                shown = len(value) if isinstance(value, tuple | list) else value
                raise RequestError(f"{name} must be {rule}; got {shown}.", param=name)
        return self


_INTEGERS = ("max_tokens", "min_tokens", "top_k")
_OPTIONAL_INTEGERS = ("seed", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty",
            "presence_penalty")  # fmt: skip
_LISTS = ("logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words")

_RULES: tuple[tuple[str, Callable[[SamplingParams], bool], str], ...] = (
    ("max_tokens", lambda p: p.max_tokens >= 0, "at least 0"),
    ("min_tokens", lambda p: 0 <= p.min_tokens <= p.max_tokens, "between 0 and max_tokens"),
    ("temperature", lambda p: 0.0 <= p.temperature <= 2.0, "between 0 and 2"),
    ("top_p", lambda p: 0.0 < p.top_p <= 1.0, "greater than 0 and at most 1"),
    ("top_k", lambda p: p.top_k >= -1, "at least 1, or 0 or -1 for all tokens"),
    ("typical_p", lambda p: 0.0 < p.typical_p <= 1.0, "greater than 0 and at most 1"),
    ("min_p", lambda p: 0.0 <= p.min_p <= 1.0, "between 0 and 1"),
    (
        "repetition_penalty",
        lambda p: 1 / MAX_REPETITION <= p.repetition_penalty <= MAX_REPETITION,
        f"greater than 0: {1 / MAX_REPETITION:g} to {MAX_REPETITION:g}",
    ),
    ("frequency_penalty", lambda p: -2.0 <= p.frequency_penalty <= 2.0, "between -2 and 2"),
    ("presence_penalty", lambda p: -2.0 <= p.presence_penalty <= 2.0, "between -2 and 2"),
    ("logprobs", lambda p: p.logprobs is None or 0 <= p.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    (
        "prompt_logprobs",
        lambda p: p.prompt_logprobs is None or 0 <= p.prompt_logprobs <= MAX_LOGPROBS,
        f"between 0 and {MAX_LOGPROBS}",
    ),
    ("logit_bias", lambda p: len(p.logit_bias) <= MAX_BIASED, f"of at most {MAX_BIASED} tokens"),
    ("logit_bias", lambda p: all(_is_bias(each) for each in p.logit_bias), "pairs of a token id and a finite number"),
    ("stop_token_ids", lambda p: len(p.stop_token_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids"),
    ("stop_token_ids", lambda p: all(map(_is_integer, p.stop_token_ids)), "token ids"),
    ("allowed_token_ids", lambda p: all(map(_is_integer, p.allowed_token_ids)), "token ids"),
    ("bad_words", lambda p: all(_is_word(each) for each in p.bad_words), f"of 1 to {MAX_WORD} token ids each"),
    ("constraint", lambda p: p.constraint is None or _is_constraint(p.constraint), "a kind and its text"),
)


def _is_integer(value: object) -> bool:
    """Whole numbers of any library, but truth values, which Python counts as such."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_bias(entry: object) -> bool:
    return (
        isinstance(entry, tuple | list)
        and len(entry) == 2
        and _is_integer(entry[0])
        and isinstance(entry[1], Real)
        and abs(float(entry[1])) <= MAX_BIAS
    )


def _is_word(word: object) -> bool:
    return isinstance(word, tuple | list) and 0 < len(word) <= MAX_WORD and all(map(_is_integer, word))


def _is_constraint(constraint: Constraint) -> bool:
    return isinstance(constraint.text, str) and isinstance(constraint.lead, str)


def _require_integer(name: str, value: object) -> None:
    if not _is_integer(value):
        raise RequestError(f"{name} must be an integer; got {value!r:.100}.", param=name)


def _require_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number; got {value!r:.100}.", param=name)


def _require_list(name: str, value: object) -> None:
    if not isinstance(value, tuple | list):
        raise RequestError(f"{name} must be a list; got {value!r:.100}.", param=name)


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
class Image:
    """An image among the tokens of a prompt, of the size that the model wants.

    `[at, at + tokens)` of the prompt stand for it, all of one placeholder id. `pixels` are rows of RGB from the top,
    `height · width · 3` bytes. `digest` is the SHA-256 of size and pixels, by which the prefix cache knows it. `span`
    is how many positions it takes, which may be fewer than its tokens.
    """

    at: int
    tokens: int
    height: int
    width: int
    pixels: bytes
    digest: bytes
    span: int

    @property
    def end(self) -> int:
        """Where what follows it begins."""
        return self.at + self.tokens


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, or with `pooling` one text to turn into a vector.

    A client's `n` choices are `n` requests that share their prompt's pages.
    `priority`: lower runs first (policy `priority`). `arrival` is seconds of the monotonic clock.
    `cache_salt` keeps the prefix cache of one tenant from another. `family`, unless empty, is common to requests with
    the same prompt: one computes it and the others take its pages. What a `session` leaves in the prefix cache
    outlives what is there without one. A text to pool has `params.max_tokens` 0. `adapter` is the `number` of an
    Adapter, 0 for none. `images` stand in the order of their tokens.
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
    adapter: int = 0
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is served. `number` is the engine's and never used twice, so one loaded again is another one.

    `name` is what clients call it, `path` its folder, `parent` the base model that was named with it, if one was.
    """

    number: int
    name: str
    path: str
    parent: str = ""


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


WEIGHTS, KV_CACHE = WAKE_TAGS = ("weights", "kv_cache")
"""The parts of a model that sleeps: what may be woken by itself, in vLLM's words."""


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
    shared_prefix_steps: int = 0
    """Decode steps that attended once for all rows what all begin with."""
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
    running_adapters: tuple[str, ...] = ()
    """Names, of adapters that were unloaded under their requests, too."""
    waiting_adapters: tuple[str, ...] = ()
    kv_event_messages: int = 0
    kv_event_messages_lost: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    draft_cost_tokens: float = 0.0
    """Tokens that plain steps would have given in the time that drafts took."""
    draft_costs: tuple[tuple[int, int, float, bool], ...] = ()
    """Of each size of batch and k: sequences at most, k, plain steps that a step with k drafts takes, whether timed."""
    draft_gains: tuple[tuple[int, float], ...] = ()
    """Of each k: k, and tokens beyond one that k drafts bring a sequence."""
    sleep_level: int = 0
    """What it sleeps at, or will as soon as nothing runs; 0: neither."""
    asleep: bool = False
    bytes_freed: int = 0
    host_weight_bytes: int = 0
    step_age: float = 0.0
    """Seconds since the newest step ended while another is awaited: as long as its slowest rank takes. Whoever waits
    knows it; the engine says 0.
    """


Ids = tuple[int, ...]
_packed: tuple[Ids, bytes] = ((), b"")


def packed(ids: Ids) -> bytes:
    """A prompt as 32-bit numbers of this machine; that of one request's choices, which come one after the other, once.

    Raises TypeError or OverflowError for what is no such number.
    """
    global _packed
    before, found = _packed
    if ids is not before:
        found = array("i", ids).tobytes()
        _packed = (ids, found)
    return found


@lru_cache(maxsize=1)
def unpacked(data: bytes) -> Ids:
    """What `packed` packed: for the choices of one request one tuple. Raises TypeError or ValueError for other data."""
    ids = array("i")
    ids.frombytes(data)
    return tuple(ids)
