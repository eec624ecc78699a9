"""The body of POST /v1/responses.

Invariants: what chat completions know of sampling means the same here; what OpenAI runs on its own side (other tools
than functions, conversations, prompt templates) is refused by name.
Knows nothing of chat messages.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from stoker_runtime.api.http.fields import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Integer,
    SamplingFields,
    StreamOptions,
)
from stoker_runtime.api.http.fields import Schema as JsonSchema

MAX_METADATA = 16

# Fields of the chat route that have another name, or no meaning, here.
NOT_HERE = (
    "best_of",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "structural_tag",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
)


def _check_input(value: Any) -> str | list[dict[str, Any]]:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        limits = {"count": len(value), "limit": MAX_MESSAGES}
        raise PydanticCustomError("input", "holds {count} items; at most {limit} are allowed", limits)
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        return value
    raise PydanticCustomError("input", "must be a string or a list of items")


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Parts of items that there are none of here.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Input = Annotated[
    str | list[dict[str, Any]], PlainValidator(_check_input, json_schema_input_type=str | list[dict[str, Any]])
]


class ResponseStreamOptions(StreamOptions):
    """Nothing so far: usage always comes with the last event."""

    UNSUPPORTED: ClassVar = {
        "include_usage": (None,),
        "continuous_usage_stats": (None,),
        "include_obfuscation": (None, False),
    }


class ReasoningOptions(Body):
    """How to reason. Reasoning comes back as it is, whichever summary of it is asked for."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Body):
    """The shape of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    """What the text should be like."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(SamplingFields):
    """POST /v1/responses."""

    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_tool_calls: Integer | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    reasoning: ReasoningOptions | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: Any = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    include: Annotated[list[Include], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    background_options: dict[str, Any] | None = None
    context_management: list[Any] | None = None
    moderation: Any = None
    access_programs: Any = None
    image: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    enable_response_messages: bool | None = None
    previous_input_messages: list[Any] | None = None
    previous_response: dict[str, Any] | None = None
    safety_identifier: str | None = None

    UNSUPPORTED: ClassVar = {
        **SamplingFields.SAMPLING_UNSUPPORTED,
        **dict.fromkeys(NOT_HERE, (None,)),
        "n": (None, 1),
        "conversation": (None,),
        "prompt": (None,),
        "background_options": (None, {}),
        "context_management": (None, []),
        "moderation": (None,),
        "access_programs": (None,),
        "enable_response_messages": (None, False),
        "previous_input_messages": (None, []),
        "previous_response": (None,),
    }


# What goes to the chat route as the client wrote it.
PASSED = (
    *(
        name
        for name in SamplingFields.model_fields
        if name not in {*NOT_HERE, "model", "n", "stream", "stream_options", "request_id"}
    ),
    "chat_template_kwargs",
    "parallel_tool_calls",
)
