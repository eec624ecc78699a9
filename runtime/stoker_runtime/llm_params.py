"""What a caller of `LLM` asks for, under the names of vLLM's offline interface, and what the engine makes of it.

Invariants: what the engine gets has passed its own validation; a field that cannot be had is an error that names it.
Knows nothing of batches; texts it knows only as far as bad words must become tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stoker_runtime import request
from stoker_runtime.api.sampling import spellings
from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint
from stoker_runtime.tokenizer import Tokenizer

MAX_CHOICES = 128


@dataclass(slots=True)
class SamplingParams:
    """How tokens are chosen, and what ends and follows them.

    `n`: choices per prompt, which share its pages. `stop`: strings that end a sequence, no part of its text unless
    `include_stop_str_in_output`. `max_tokens` None: as many as fit the model. `top_k` 0 or -1: all tokens.
    `bad_words`: words that are never written, or their token ids. `constraint`: what the whole output must match.
    `detokenize` False leaves `text` empty. The rest is as in `stoker_runtime.request.SamplingParams`.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    allowed_token_ids: Sequence[int] | None = ()
    bad_words: Sequence[str | Sequence[int]] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    constraint: Constraint | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises RequestError for an empty one."""
        found = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in found:
            raise RequestError("stop must not hold an empty string.", param="stop")
        if found and not self.detokenize:
            raise RequestError("stop needs detokenize.", param="stop")
        return found

    def resolve(self, room: int, tokenizer: Callable[[], Tokenizer]) -> request.SamplingParams:
        """What the engine gets for a prompt that leaves `room` tokens. Raises RequestError naming the field."""
        if not 1 <= self.n <= MAX_CHOICES:
            raise RequestError(f"n must be between 1 and {MAX_CHOICES}; got {self.n}.", param="n")
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias or ()
        return request.SamplingParams(
            max_tokens=max(room, 1) if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0) if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            seed=self.seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logit_bias=tuple((int(token), max(-100.0, min(100.0, float(value)))) for token, value in bias),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=self._bad_words(tokenizer),
            constraint=self.constraint,
        ).validate()

    def _bad_words(self, tokenizer: Callable[[], Tokenizer]) -> tuple[tuple[int, ...], ...]:
        words = self.bad_words or ()
        texts = [word for word in words if isinstance(word, str)]
        spelled = spellings(texts, tokenizer()) if texts else ()
        return (*spelled, *(tuple(word) for word in words if not isinstance(word, str)))


def sibling(params: request.SamplingParams, at: int) -> request.SamplingParams:
    """The parameters of choice `at`: with a seed, each choice has one of its own."""
    return params if params.seed is None or not at else replace(params, seed=params.seed + at)
