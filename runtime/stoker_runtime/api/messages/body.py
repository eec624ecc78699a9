"""The bodies of Anthropic's Messages API.

Invariants: what only Anthropic's own service can do (its tools, containers, MCP servers) is refused by name.
Knows nothing of chat messages.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from stoker_runtime.api.http.fields import MAX_MESSAGES, MAX_TOOLS, Body, Integer, SizedBody
from stoker_runtime.api.http.fields import Schema as JsonSchema


def _check_blocks(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list) and all(isinstance(block, dict) for block in value):
        return value
    raise PydanticCustomError("content", "must be a string or a list of content blocks")


Blocks = Annotated[
    list[dict[str, Any]], PlainValidator(_check_blocks, json_schema_input_type=str | list[dict[str, Any]])
]


class MessageParam(Body):
    """One turn. A text is one block of text."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolChoice(Body):
    """Whether to call, and what."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether to think first. The budget is a bound that the model is not held to; `max_tokens` is one that it is."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """The shape of the text."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(Body):
    """What the answer should be like."""

    effort: str | None = None
    format: OutputFormat | None = None


class PromptFields(SizedBody):
    """What makes the prompt."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Blocks | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    PROMPT_UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "context_management": (None, {}, {"edits": []}),
        "mcp_servers": (None, []),
    }
    UNSUPPORTED: ClassVar = PROMPT_UNSUPPORTED


class CountTokensBody(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesBody(PromptFields):
    """POST /v1/messages."""

    max_tokens: Annotated[Integer, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    inference_geo: str | None = None
    speed: str | None = None
    diagnostics: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    UNSUPPORTED: ClassVar = {
        **PromptFields.PROMPT_UNSUPPORTED,
        "service_tier": (None, "auto", "standard_only"),
        "container": (None,),
        "inference_geo": (None,),
        "speed": (None, "standard"),
        "diagnostics": (None,),
    }
