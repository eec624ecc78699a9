"""The request bodies of the OpenAI routes, as OpenAI and vLLM define them together.

Invariants: every field that either knows stands here, so that what is not supported can be refused by its name
instead of "unknown". See fields.py for the rules.
Knows nothing of engines, tokens or HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from stoker_runtime.api.answering.chat_message import ChatMessage
from stoker_runtime.api.http.fields import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOOLS,
    Ids,
    Integer,
    Prompt,
    SamplingFields,
    SizedBody,
)
from stoker_runtime.api.tools.tools import ToolSpec


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[Integer, Field(ge=0)] | None = 16
    echo: bool | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Any = None

    UNSUPPORTED: ClassVar = {
        **SamplingFields.SAMPLING_UNSUPPORTED,
        "suffix": (None, ""),
        "prompt_embeds": (None,),
    }


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    moderation: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    UNSUPPORTED: ClassVar = {
        **SamplingFields.SAMPLING_UNSUPPORTED,
        "functions": (None,),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "web_search_options": (None,),
        "moderation": (None,),
    }


class TokenizeBody(SizedBody):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class DetokenizeBody(SizedBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
