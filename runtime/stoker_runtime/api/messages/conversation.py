"""From Anthropic's content blocks to the body of a chat request.

Invariants: each result of a tool is a message of its own, in its place; a last message of the assistant is continued,
as Anthropic does; every message remembers the turn that it came from, so that errors can name it.
Knows nothing of templates, tokens or answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stoker_runtime.api.messages.body import MessagesBody, OutputFormat, PromptFields, ToolChoice
from stoker_runtime.errors import RequestError

Block = Mapping[str, Any]
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stream")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Messages:
    """The messages of a conversation in the making."""

    def __init__(self, sees: bool) -> None:
        """`sees`: the model takes images."""
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self.images: list[tuple[str, str]] = []
        """Fields of images, and where they came from."""
        self._sees = sees

    def append(self, message: dict[str, Any], where: str) -> None:
        """Append a message that came from `where`."""
        self.messages.append(message)
        self.origins.append(where)

    def system(self, blocks: Sequence[Block], where: str) -> None:
        """Append what the operator of the conversation says."""
        parts = [_text_part(block, f"{where}[{at}]") for at, block in enumerate(blocks)]
        self.append({"role": "system", "content": parts}, where)

    def user(self, blocks: Sequence[Block], where: str) -> None:
        """Append a turn of the user: texts, images, and results of tools."""
        texts: list[dict[str, Any]] = []
        for at, block in enumerate(blocks):
            if block.get("type") != "tool_result":
                texts.append(self._part(block, f"{where}.content[{at}]", len(texts)))
                continue
            self._texts(texts, where)
            texts = []
            self.append(self._tool_message(block, f"{where}.content[{at}]"), where)
        if texts or not blocks:
            self._texts(texts or [{"type": "text", "text": ""}], where)

    def _texts(self, texts: list[dict[str, Any]], where: str) -> None:
        if texts:
            self.append({"role": "user", "content": texts}, where)

    def _part(self, block: Block, where: str, at: int) -> dict[str, Any]:
        """A text, or an image where the model sees: part `at` of the message that is appended next."""
        if not self._sees or block.get("type") != "image":
            return _text_part(block, where)
        part, came_from = _image_part(block, where)
        self.images.append((f"messages[{len(self.messages)}].content[{at}].image_url.url", came_from))
        return part

    def _tool_message(self, block: Block, where: str) -> dict[str, Any]:
        """The result of a tool. A failure is said in words, for chat templates know no other way."""
        content = block.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            failed = [{"type": "text", "text": "Error:"}] if block.get("is_error") and _has_image(content) else []
            begin = len(failed)
            parts = failed + [
                self._part(part, f"{where}.content[{at}]", begin + at) for at, part in enumerate(content)
            ]
        elif content is None or isinstance(content, str):
            parts = [{"type": "text", "text": content or ""}]
        else:
            raise RequestError(f"{where}.content must be a string or a list of blocks.", param=f"{where}.content")
        found = {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where)}
        if any(part["type"] != "text" for part in parts):
            return {**found, "content": parts}
        text = "\n".join(part["text"] for part in parts)
        return {**found, "content": f"Error: {text}" if block.get("is_error") else text}

    def assistant(self, blocks: Sequence[Block], where: str) -> None:
        """Append a turn of the assistant: thinking, texts and calls in one message."""
        message: dict[str, Any] = {"role": "assistant"}
        texts, thoughts, calls = [], [], []
        for at, block in enumerate(blocks):
            inner = f"{where}.content[{at}]"
            if block.get("type") == "thinking":
                thoughts.append(_string(block, "thinking", inner))
            elif block.get("type") == "tool_use":
                calls.append(_call(block, inner))
            else:
                texts.append(_text_part(block, inner))
        message["content"] = texts
        if thoughts:
            message["reasoning"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.append(message, where)


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return value


def _text_part(block: Block, where: str) -> dict[str, Any]:
    if block.get("type") != "text":
        raise RequestError(
            f"{where}.type is {block.get('type')!r}, which this model cannot read here.", param=f"{where}.type"
        )
    return {"type": "text", "text": _string(block, "text", where)}


def _call(block: Block, where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise RequestError(f"{where}.input must be an object.", param=f"{where}.input")
    function = {"name": _string(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _has_image(blocks: Sequence[Block]) -> bool:
    return any(block.get("type") == "image" for block in blocks)


def _image_part(block: Block, where: str) -> tuple[dict[str, Any], str]:
    """An image as the chat route takes it, and the field that it came from."""
    source = block.get("source")
    if not isinstance(source, dict):
        raise RequestError(f"{where}.source must be an object.", param=f"{where}.source")
    inner, kind = f"{where}.source", source.get("type")
    if kind == "url":
        url, field = _string(source, "url", inner), f"{inner}.url"
    elif kind == "base64":
        media = _string(source, "media_type", inner)
        if not media.startswith("image/"):
            raise RequestError(f"{inner}.media_type is {media!r:.100}; it must be that of an image.", param=inner)
        url, field = f"data:{media};base64,{_string(source, 'data', inner)}", f"{inner}.data"
    else:
        raise RequestError(f"{inner}.type is {kind!r:.100}; it must be base64 or url.", param=f"{inner}.type")
    return {"type": "image_url", "image_url": {"url": url}}, field


def prompt_fields(body: PromptFields, sees: bool = False) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The fields of a chat request that make its prompt, and where they came from. Raises RequestError.

    `sees`: the model takes images.
    """
    found = Messages(sees)
    if body.system:
        found.system(body.system, "system")
    for at, turn in enumerate(body.messages):
        where = f"messages[{at}]"
        if turn.role == "system":
            found.system(turn.content, f"{where}.content")
        elif turn.role == "user":
            found.user(turn.content, where)
        else:
            found.assistant(turn.content, where)
    payload: dict[str, Any] = {"model": body.model, "messages": found.messages}
    last = found.messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        payload |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        payload["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools)]
    extra = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        extra["enable_thinking"] = body.thinking.type != "disabled"
    if extra:
        payload["chat_template_kwargs"] = extra
    return payload, [*found.images, *((f"messages[{at}]", origin) for at, origin in enumerate(found.origins))]


def chat_request(body: MessagesBody, sees: bool = False) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The chat request that `body` stands for, and where its fields came from. Raises RequestError."""
    payload, names = prompt_fields(body, sees)
    payload |= {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if body.stop_sequences:
        payload["stop"] = body.stop_sequences
    if body.tool_choice is not None:
        payload |= _choice(body.tool_choice, bool(body.tools))
    if body.thinking is not None and (body.thinking.type == "disabled" or body.thinking.display == "omitted"):
        payload["include_reasoning"] = False
    if body.output_config is not None and body.output_config.effort is not None:
        payload["reasoning_effort"] = body.output_config.effort
    payload |= _format(body)
    names += [(f"tools[{at}].function.parameters", f"tools[{at}].input_schema") for at in range(len(body.tools or ()))]
    names += [(f"tools[{at}].function", f"tools[{at}]") for at in range(len(body.tools or ()))]
    return payload, [
        *names,
        ("stop", "stop_sequences"),
        ("prompt", "messages"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("reasoning_effort", "output_config.effort"),
        ("continue_final_message", "messages"),
    ]


def _format(body: MessagesBody) -> dict[str, Any]:
    wanted: OutputFormat | None = body.output_config.format if body.output_config else None
    if wanted is not None and body.output_format is not None:
        raise RequestError("output_format and output_config.format exclude each other.", param="output_format")
    wanted = wanted or body.output_format
    if wanted is None:
        return {}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema_}}}


def _choice(choice: ToolChoice, tools: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if choice.type == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif tools or choice.type == "any":
        found["tool_choice"] = CHOICES[choice.type]
    if choice.disable_parallel_tool_use is not None and tools:
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return found


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise RequestError(f"{where}.type is {kind!r}; this server has no tools of its own.", param=f"{where}.type")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}
