"""From the items of the Responses API to the body of a chat request.

Invariants: what one turn of the model made (reasoning, text, calls) becomes one message of the assistant, in which
form chat templates know it; every message remembers the item that it came from, so that errors can name it.
Knows nothing of templates, tokens or answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker_runtime.api.responses.body import PASSED, ResponsesBody, TextOptions
from stoker_runtime.errors import RequestError

Item = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant")


class Messages:
    """The messages of a conversation in the making."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._turn: dict[str, Any] | None = None

    def add(self, item: Item, where: str) -> None:
        """Append an item. Raises RequestError that names it."""
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            function = {name: _text(item, name, where) for name in ("name", "arguments")}
            call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
            self._assistant(where).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            self._append({"role": "tool", "tool_call_id": _text(item, "call_id", where)}, where)
            self.messages[-1]["content"] = _content(item.get("output"), f"{where}.output")
        elif kind == "reasoning":
            turn = self._assistant(where, new=self._said())
            turn["reasoning"] = turn.get("reasoning", "") + _reasoning(item, where)
        else:
            raise RequestError(
                f"{where}.type is {kind!r}; this server knows message, function_call, function_call_output and "
                "reasoning.",
                param=f"{where}.type",
            )

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise RequestError(
                f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}.", param=f"{where}.role"
            )
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._assistant(where, new=self._said())["content"] = content
        else:
            self._append({"role": role, "content": content}, where)

    def _said(self) -> bool:
        """Whether the assistant's turn already has what may come only once, or last."""
        return self._turn is not None and ("content" in self._turn or "tool_calls" in self._turn)

    def _assistant(self, where: str, new: bool = False) -> dict[str, Any]:
        if self._turn is None or new:
            message: dict[str, Any] = {"role": "assistant"}
            self._append(message, where)
            self._turn = message
        return self._turn

    def _append(self, message: dict[str, Any], where: str) -> None:
        self._turn = None
        self.messages.append(message)
        self.origins.append(where)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return value


def _content(value: Any, where: str) -> str | list[dict[str, Any]]:
    """A content as it stands: the chat route reads texts and parts, also these parts."""
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, dict) for part in value)):
        return value
    raise RequestError(f"{where} must be a string or a list of parts.", param=where)


def _reasoning(item: Item, where: str) -> str:
    """The reasoning itself, or where only a summary is left, that."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise RequestError(f"{where}.content must be a list of parts.", param=f"{where}.content")
    return "\n".join(_text(part, "text", f"{where}.content[{at}]") for at, part in enumerate(parts))


def input_items(body: ResponsesBody) -> list[Item]:
    """The input as items; an empty one is refused."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    if not body.input and body.previous_response_id is None:
        raise RequestError("input must hold at least one item.", param="input")
    return body.input


def chat_request(
    body: ResponsesBody, raw: Mapping[str, Any], history: Sequence[Item], items: Sequence[Item]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The chat request that `body` stands for, after `history`, and where its fields came from.

    `raw` is the body as it was sent. Raises RequestError.
    """
    found = Messages()
    if body.instructions is not None:
        found.add({"role": "system", "content": body.instructions}, "instructions")
    for at, item in enumerate(history):
        found.add(item, f"previous_response_id.items[{at}]")
    for at, item in enumerate(items):
        found.add(item, "input" if isinstance(body.input, str) else f"input[{at}]")
    payload: dict[str, Any] = {name: raw[name] for name in PASSED if name in raw}
    payload |= {"model": body.model, "messages": found.messages, **_tools(body), **_format(body.text)}
    if body.max_output_tokens is not None:
        payload["max_completion_tokens"] = body.max_output_tokens
    if body.truncation == "auto":
        payload["truncate_prompt_tokens"] = -1
    if body.reasoning is not None and body.reasoning.effort is not None:
        payload["reasoning_effort"] = body.reasoning.effort
    if wants_logprobs(body):
        payload |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return payload, _names(body, found.origins)


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether the text comes with log-probabilities."""
    return bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())


def _names(body: ResponsesBody, origins: Sequence[str]) -> list[tuple[str, str]]:
    names = [(f"messages[{at}]", origin) for at, origin in enumerate(origins)]
    names += [(f"tools[{at}].function", f"tools[{at}]") for at in range(len(body.tools or ()))]
    return [
        *names,
        ("messages", "input"),
        ("prompt", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("max_tokens", "max_output_tokens"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
        ("reasoning_effort", "reasoning.effort"),
    ]


def _format(text: TextOptions | None) -> dict[str, Any]:
    if text is None or text.format is None:
        return {}
    wanted = text.format
    if wanted.type != "json_schema":
        return {"response_format": {"type": wanted.type}}
    described = wanted.model_dump(by_alias=True, exclude_unset=True, exclude={"type"})
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _tools(body: ResponsesBody) -> dict[str, Any]:
    """The functions and the choice, as the chat route spells them."""
    tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        names = [entry.get("name") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        tools = [tool for tool in tools if tool["function"].get("name") in names]
        if not tools:
            raise RequestError("tool_choice allows none of the tools.", param="tool_choice")
        choice = choice.get("mode", "auto")
    elif isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    found: dict[str, Any] = {"tools": tools} if tools else {}
    if choice is not None and (tools or choice != "auto"):
        found["tool_choice"] = choice
    return found


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(f"{where}.type is {kind!r}; this server knows functions only.", param=f"{where}.type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
