"""What a caller of `LLM` asks for, under the names of vLLM's offline interface, and what the engine makes of it.

Invariants: what the engine gets has passed its own validation; a field that cannot be had is an error that names it.
Knows nothing of batches; texts it knows only as far as bad words must become tokens.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from stoker_runtime import request
from stoker_runtime.api.generate.sampling import load_defaults, spellings
from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint
from stoker_runtime.text.tokenizer import Tokenizer

MAX_CHOICES = 128
MAX_BEAMS = 10
"""Twice as many alternatives are looked at for each beam, which is all that the engine lists."""


@dataclass(slots=True)
class StructuredOutputsParams:
    """What the whole output must match: exactly one of the first six.

    `json`: a JSON schema, as an object or as its text. `grammar`: Lark or EBNF. `json_object`: any JSON object.
    `structural_tag`: tags as JSON text. JSON is written without blanks, or only with those of a pattern, by the two
    fields about whitespace; `disable_additional_properties` closes every object of a schema that leaves it open.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def constraint(self, tokenizer: Callable[[], Tokenizer], name: str) -> Constraint:
        """What it asks for. Raises RequestError, which speaks of it as `name`."""
        from stoker_runtime.api.constraints.structured import single, structured_outputs
        from stoker_runtime.api.http.fields import StructuredOutputs
        from stoker_runtime.api.http.validation import parse_body

        values = {each.name: getattr(self, each.name) for each in fields(StructuredOutputsParams)}
        try:
            given = json_text.dumps({key: value for key, value in values.items() if value not in (None, False)})
        except TypeError as error:
            raise RequestError(f"{name} must be plain data: {error}.", param=name) from error
        return single(structured_outputs(parse_body(given.encode(), StructuredOutputs), tokenizer(), name))[1]


@dataclass(slots=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """StructuredOutputsParams under its older name; whichever `backend` is named, every constraint is enforced."""

    backend: str | None = None
    disable_fallback: bool = False


@dataclass(slots=True)
class BeamSearchParams:
    """A search for the likeliest continuations, `beam_width` of them, by the model's own log-probabilities.

    `length_penalty` is the power of a beam's length that its score is divided by. `temperature` is taken and changes
    nothing, because it does not change which of two continuations is the likelier one.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def validate(self) -> BeamSearchParams:
        """Return self. Raises RequestError naming the field and its range."""
        for name, most in (("beam_width", MAX_BEAMS), ("max_tokens", None)):
            value = getattr(self, name)
            if value < 1 or (most is not None and value > most):
                allowed = "at least 1" if most is None else f"between 1 and {most}"
                raise RequestError(f"{name} must be {allowed}; got {value}.", param=name)
        return self


@dataclass(slots=True)
class SamplingParams:
    """How tokens are chosen, and what ends and follows them.

    `n`: choices per prompt, which share its pages. `stop`: strings that end a sequence, no part of its text unless
    `include_stop_str_in_output`. `max_tokens` None: as many as fit the model. `top_k` 0 or -1: all tokens.
    `bad_words`: words that are never written, or their token ids. `truncate_prompt_tokens`: the prompt keeps so many of
    its last tokens, or with -1 as many as fit. `structured_outputs`: what the whole output must match, `constraint` the
    same in the engine's words. `detokenize` False leaves `text` empty. No blanks ever come between special tokens, so
    `spaces_between_special_tokens` changes nothing. The rest is as in `stoker_runtime.request.SamplingParams`.
    """

    n: int = 1
    max_tokens: int | None = 16
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
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: GuidedDecodingParams | None = None
    constraint: Constraint | None = None

    def clone(self) -> SamplingParams:
        """A copy, which can be changed on its own."""
        return replace(self)

    def cut(self, ids: tuple[int, ...], longest: int) -> tuple[int, ...]:
        """The prompt that is left of `ids` for a model of `longest` tokens. Raises RequestError."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep < -1 or keep == 0:
            raise RequestError(
                f"truncate_prompt_tokens must be at least 1, or -1; got {keep}.", param="truncate_prompt_tokens"
            )
        return ids[-(max(longest - (self.max_tokens or 1), 1) if keep == -1 else keep) :]

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
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            typical_p=self.typical_p,
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
            constraint=self._constraint(tokenizer),
        ).validate()

    def _constraint(self, tokenizer: Callable[[], Tokenizer]) -> Constraint | None:
        names = [name for name in ("structured_outputs", "guided_decoding", "constraint") if getattr(self, name)]
        if len(names) > 1:
            raise RequestError(f"{names[0]} and {names[1]} exclude each other.", param=names[1])
        asked = self.structured_outputs or self.guided_decoding
        return asked.constraint(tokenizer, names[0]) if asked is not None else self.constraint

    def _bad_words(self, tokenizer: Callable[[], Tokenizer]) -> tuple[tuple[int, ...], ...]:
        words = self.bad_words or ()
        texts = [word for word in words if isinstance(word, str)]
        spelled = spellings(texts, tokenizer()) if texts else ()
        return (*spelled, *(tuple(word) for word in words if not isinstance(word, str)))


def model_params(model: str) -> SamplingParams:
    """The parameters that a model's generation_config.json asks for, where it asks for any."""
    found = load_defaults(model)
    return SamplingParams(
        temperature=found.temperature,
        top_p=found.top_p,
        top_k=found.top_k,
        min_p=found.min_p,
        repetition_penalty=found.repetition_penalty,
        max_tokens=found.max_new_tokens or SamplingParams().max_tokens,
    )


@dataclass(slots=True)
class PoolingParams:
    """How texts are embedded. `dimensions` cuts the vectors of a Matryoshka model to so many numbers.

    `use_activation`, or by its older name `normalize`: whether vectors get the length 1; None does as the model says.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


def sibling(params: request.SamplingParams, at: int) -> request.SamplingParams:
    """The parameters of choice `at`: with a seed, each choice has one of its own."""
    return params if params.seed is None or not at else replace(params, seed=params.seed + at)
