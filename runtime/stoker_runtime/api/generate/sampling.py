"""From the fields of a body to the `SamplingParams` of the engine, with the model's own defaults.

Invariants: what comes out has passed `SamplingParams.validate` and fits the model's vocabulary; a field that the
client set always wins over generation_config.json.
Knows nothing of text or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stoker_runtime.api.http.fields import SamplingFields, slices
from stoker_runtime.errors import ModelError, RequestError
from stoker_runtime.request import MAX_WORD, SamplingParams
from stoker_runtime.text.tokenizer import Tokenizer

MAX_BEAMS = 10
WORD_CHARACTERS = 1024
"""Of a bad word: more than most that are short enough in tokens."""
_NO_BEAMS = (
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "constraint",
)
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What applies where a client says nothing. `max_new_tokens` caps the length of an answer; None: no cap."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


def load_defaults(model: str) -> SamplingDefaults:
    """The defaults that the model's folder asks for in generation_config.json, if there is one."""
    path = Path(model) / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}.") from error
    base = SamplingDefaults()

    def fraction(name: str, default: float) -> float:
        value = stored.get(name)
        return float(value) if isinstance(value, (int, float)) else default

    top_k, cap = stored.get("top_k"), stored.get("max_new_tokens")
    return SamplingDefaults(
        temperature=fraction("temperature", base.temperature),
        top_p=fraction("top_p", base.top_p),
        top_k=top_k if isinstance(top_k, int) else base.top_k,
        min_p=fraction("min_p", base.min_p),
        repetition_penalty=fraction("repetition_penalty", base.repetition_penalty),
        max_new_tokens=cap if isinstance(cap, int) else None,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request: the model's context, its vocabulary, and the server's queueing policy."""

    max_model_len: int
    vocab_size: int
    priorities: bool
    eos_token_ids: tuple[int, ...] = ()
    max_queued: int = 4096


def spellings(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of bad words: each word as it begins a text, and as it follows a blank.

    Of a word that is too long to be one the beginning is given, which is too long as well.
    """
    texts = [before + word.lstrip(" ") for word in words for before in ("", " ")]
    found = tokenizer.encode_many_plain([text[:WORD_CHARACTERS] for text in texts])
    for at, text in enumerate(texts):
        if len(text) > WORD_CHARACTERS and len(found[at]) <= MAX_WORD:
            found[at] = tokenizer.encode_plain(text)
    return tuple(dict.fromkeys(tuple(ids) for ids in found if ids))


def build_params(
    body: SamplingFields,
    max_tokens: int,
    logprobs: int | None,
    limits: Limits,
    defaults: SamplingDefaults,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """The parameters of each choice but its seed; `bad_words` in tokens. Raises RequestError naming the field."""
    _check_best_of(body)
    if body.priority and not limits.priorities:
        raise RequestError("priority needs a server that runs with --scheduling-policy priority.", param="priority")
    if body.prompt_logprobs and body.stream:
        raise RequestError("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
    check_ids("stop_token_ids", body.stop_token_ids or (), limits.vocab_size)
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise RequestError("allowed_token_ids allows no token at all; leave it out.", param="allowed_token_ids")
    check_ids("allowed_token_ids", body.allowed_token_ids or (), limits.vocab_size)
    check_ids("logit_bias", [token for token, _ in body.logit_bias], limits.vocab_size)
    top_k = _or(body.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=0 if top_k in (-1, 0) or top_k >= limits.vocab_size else top_k,
        min_p=_or(body.min_p, defaults.min_p),
        typical_p=_or(body.typical_p, 1.0),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=body.logit_bias,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=bad_words,
    ).validate()


def _check_best_of(body: SamplingFields) -> None:
    n = body.n or 1
    if body.best_of is None or body.best_of == n:
        return
    if body.best_of < n:
        raise RequestError(f"best_of must be at least n, which is {n}; got {body.best_of}.", param="best_of")
    if body.stream:
        raise RequestError("best_of cannot be streamed: the best are known at the end.", param="best_of")


def check_beams(body: SamplingFields, params: SamplingParams) -> None:
    """Raise RequestError for what beam search cannot do; it samples nothing, so temperature and filters do not matter.

    It ranks by the model's own log-probabilities, so whatever else would change what may come next is refused.
    """
    name = "use_beam_search"
    if body.stream:
        raise RequestError("use_beam_search cannot be streamed: the best are known at the end.", param=name)
    if (body.n or 1) > MAX_BEAMS:
        raise RequestError(f"n must be at most {MAX_BEAMS} with use_beam_search; got {body.n}.", param="n")
    plain = SamplingParams()
    changed = [field for field in _NO_BEAMS if getattr(params, field) != getattr(plain, field)]
    changed += [field for field in ("stop", "best_of") if getattr(body, field)]
    if changed:
        what = "structured output" if changed[0] == "constraint" else changed[0]
        raise RequestError(f"{what} is not supported together with use_beam_search.", param=name)


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless every id lies in the model's vocabulary."""
    for some in slices(ids):
        least, most = min(some), max(some)
        if least < 0 or most >= vocab_size:
            wrong = least if least < 0 else most
            raise RequestError(
                f"{field} holds the token id {wrong}; this model's ids are 0 to {vocab_size - 1}.", param=field
            )


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
