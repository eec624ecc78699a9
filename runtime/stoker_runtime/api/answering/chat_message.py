"""A message of a conversation, as the bodies of several routes hold it.

Invariants: what clients keep of answers, other servers' too, may be sent back.
Knows nothing of templates.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stoker_runtime.api.http.fields import Body, Content


class ChatMessage(Body):
    """One message. `content` is a text, or a list of parts; templates see whatever stands here."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    annotations: list[Any] | None = None
    tools: list[Any] | None = None
    # What clients keep of answers, other servers' too, and send back.
    parsed: Any = None
    id: str | None = None
    images: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None
    reasoning_details: list[Any] | None = None
    thinking_blocks: list[Any] | None = None

    UNSUPPORTED: ClassVar = {
        "function_call": (None,),
        "audio": (None,),
        "tools": (None, []),
        "images": (None, []),
    }
