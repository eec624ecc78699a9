"""The vocabulary of request bodies: field types that several routes share, and the base of every body.

Invariants: strict types (a string is no number), and an unknown field is an error. A field that is known but not
supported stands in the body's `UNSUPPORTED` table with the values that mean "off"; any other value is refused by name.
A field that asks for nothing that could come out differently here (who asks, which backend, how soon, media of a model
that reads text) is taken, because clients of vLLM and OpenAI send it.
Knows nothing of engines, tokens or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, PrivateAttr
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_SEQUENCES = 4096
"""Prompts times choices of one request."""
MAX_BAD_WORDS = 1024
MAX_MESSAGES = 4096
"""Messages of a conversation, or the items of an input that become messages."""
MAX_TOOLS = 1024
MAX_OPTIONS = 4096
"""Texts of which an answer is to be one."""
MAX_TIMEOUT = 86_400.0


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    # How the body comes.
    MEDIA_TYPE: ClassVar[str] = "application/json"
    # field -> values that ask for nothing; see refuse_unsupported in validation.py
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {}


class SizedBody(Body):
    """A body that knows how many bytes it came in, by which what is made of it is done beside the event loop."""

    _size: int = PrivateAttr(0)

    @property
    def size(self) -> int:
        """Bytes of its text; 0 where it had none."""
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size


class TimedBody(SizedBody):
    """A body of a request that has an id, and may take only so many seconds."""

    request_id: Annotated[str, Field(max_length=128)] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None


def _as_integer(value: Any) -> Any:
    """A number without a fraction is an integer, however it is written: JSON knows no difference."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_as_integer)]


def _check_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or any(not isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", "holds {count} strings; at most {limit} are allowed", _counts(stops))
    if "" in stops:
        raise PydanticCustomError("stop", "must not hold an empty string")
    return tuple(stops)


def _counts(stops: list[Any]) -> dict[str, Any]:
    return {"count": len(stops), "limit": MAX_STOPS}


def _check_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token id to bias")
    pairs: list[tuple[int, float]] = []
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit()):
            raise PydanticCustomError("logit_bias", "has the key {key}, which is no token id", {"key": repr(key)})
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise PydanticCustomError("logit_bias", "of token {key} must be a number", {"key": key})
        pairs.append((int(key), max(-100.0, min(100.0, float(bias)))))
    return tuple(pairs)


SLICE = 65_536
"""Ids that are looked at in one step, which holds the interpreter."""


def slices(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """The ids in order, so many at a time as may be looked at in one step."""
    for at in range(0, len(ids), SLICE):
        yield ids[at : at + SLICE]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(set(map(type, some)) == {int} for some in slices(value))


def _check_ids(value: Any) -> list[int]:
    """Token ids. One of them written with a fraction of nothing is an integer as well."""
    if isinstance(value, list):
        if not value or _is_ids(value):
            return value
        found = [_as_integer(entry) for entry in value]
        if _is_ids(found):
            return found
    raise PydanticCustomError("ids", "must be a list of token ids")


PromptInput = str | list[str] | list[int] | list[list[int]]


def _check_prompt(value: Any) -> tuple[str | list[int], ...]:
    """One entry a prompt: its text, or its ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_ids(value):
            return (value,)
        if len(value) > MAX_SEQUENCES:
            limits = {"count": len(value), "limit": MAX_SEQUENCES}
            raise PydanticCustomError("prompt", "holds {count} prompts; at most {limit} are allowed", limits)
        if all(isinstance(entry, str) for entry in value) or all(_is_ids(entry) for entry in value):
            return tuple(value)
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids or a list of lists of token ids, not empty"
    )


def _check_content(value: Any) -> str | list[dict[str, Any]] | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, (dict, str)) for part in value):
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]
    raise PydanticCustomError("content", "must be a string or a list of parts")


Ids = Annotated[list[int], PlainValidator(_check_ids, json_schema_input_type=list[int])]
Stop = Annotated[tuple[str, ...], PlainValidator(_check_stop, json_schema_input_type=str | list[str] | None)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_check_logit_bias, json_schema_input_type=dict[str, float] | None),
]
Prompt = Annotated[tuple[str | list[int], ...], PlainValidator(_check_prompt, json_schema_input_type=PromptInput)]

Content = Annotated[
    str | list[dict[str, Any]] | None,
    PlainValidator(_check_content, json_schema_input_type=str | list[dict[str, Any] | str] | None),
]


class StreamOptions(Body):
    """What a stream reports besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    UNSUPPORTED: ClassVar = {"include_obfuscation": (None, False)}


Schema = dict[str, Any] | bool


class JsonSchemaFormat(Body):
    """A named JSON schema, always enforced. `strict`: objects hold what they name alone, unless they say otherwise."""

    name: str
    schema_: Schema | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The shape of the answer, as OpenAI asks for it; structural tags as vLLM does."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    triggers: Annotated[list[str], Field(fail_fast=True)] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Body):
    """The shape of the answer, as vLLM asks for it; one of the first six."""

    json_: Schema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_OPTIONS, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None


class SamplingFields(TimedBody):
    """What every generating route knows of sampling; None means the model's or the server's default."""

    model: str | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = ()
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    logit_bias: LogitBias = ()
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None
    ) = None
    logprob_token_ids: Ids | None = None
    thinking_token_budget: Integer | None = None
    repetition_detection: dict[str, Any] | None = None
    watermarking: bool | None = None
    use_beam_search: bool | None = None
    early_stopping: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[Integer, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=MAX_OPTIONS, fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), lt=2**31)] | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_offsets: bool | None = None
    return_mm_kwargs: bool | None = None
    routed_experts_prompt_start: Integer | None = None
    logits_processors: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    user: str | None = None

    SAMPLING_UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "early_stopping": (None, False),
        "logits_processors": (None, []),
        "logprob_token_ids": (None,),
        "thinking_token_budget": (None, -1),
        "repetition_detection": (None,),
        "watermarking": (None, False),
        "kv_transfer_params": (None, {}),
        "ec_transfer_params": (None, {}),
    }
