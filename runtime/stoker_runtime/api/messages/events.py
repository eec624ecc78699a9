"""A message as it grows: chat deltas in, the events of Anthropic's Messages API out, and the whole message.

Invariants: every block is started, filled and stopped before the next begins; a message that was streamed equals
the one that was not, because both grow here; a whole answer is one large delta.
Knows nothing of engines or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

Event = dict[str, Any]


@dataclass(slots=True)
class _Open:
    """The block that is being written; `key` tells calls apart."""

    kind: str
    key: object
    block: dict[str, Any]
    pieces: list[str] = field(default_factory=list)


class MessageBuilder:
    """One message. `message` is the object as it stands; its content holds the blocks that are done."""

    def __init__(self, name: str, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        self._open: _Open | None = None

    def begin(self, usage: Mapping[str, Any]) -> list[Event]:
        """The message, with what is known of its prompt."""
        self.message["usage"] = message_usage(usage)
        return [{"type": "message_start", "message": {**self.message, "content": []}}, {"type": "ping"}]

    def add(self, delta: Mapping[str, Any]) -> list[Event]:
        """What one delta of the chat route says: reasoning, then content, then calls."""
        events: list[Event] = []
        if reasoning := delta.get("reasoning"):
            events += self._write("thinking", None, reasoning, {"thinking": "", "signature": ""})
        if content := delta.get("content"):
            events += self._write("text", None, content, {"text": "", "citations": None})
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            opening = {"id": call.get("id"), "name": function.get("name"), "input": {}}
            events += self._write("tool_use", call["index"], function.get("arguments") or "", opening)
        return events

    def finish(self, choice: Mapping[str, Any], usage: Mapping[str, Any]) -> list[Event]:
        """The end: `choice` says why."""
        events = self._close()
        reason, sequence = self._stop(choice)
        self.message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": message_usage(usage)}
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        events.append({"type": "message_delta", "delta": delta, "usage": self.message["usage"]})
        return [*events, {"type": "message_stop"}]

    def _stop(self, choice: Mapping[str, Any]) -> tuple[str, str | None]:
        if choice.get("finish_reason") in ("length", "abort"):
            # Of a text that the server cut short there is no word but this that says it is not whole.
            return "max_tokens", None
        if any(block["type"] == "tool_use" for block in self.message["content"]):
            return "tool_use", None
        if isinstance(choice.get("stop_reason"), str):
            return "stop_sequence", choice["stop_reason"]
        return "end_turn", None

    def _write(self, kind: str, key: object, text: str, opening: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        if self._open is None or (self._open.kind, self._open.key) != (kind, key):
            events = self._close()
            self._open = _Open(kind, key, {"type": kind, **opening})
            events.append({"type": "content_block_start", "index": self._index, "content_block": {**self._open.block}})
        if text:
            self._open.pieces.append(text)
            events.append({"type": "content_block_delta", "index": self._index, "delta": _delta(kind, text)})
        return events

    @property
    def _index(self) -> int:
        return len(self.message["content"])

    def _close(self) -> list[Event]:
        """Stop the open block, if there is one."""
        current, self._open = self._open, None
        if current is None:
            return []
        text, index = "".join(current.pieces), self._index
        if current.kind == "tool_use":
            current.block["input"] = _arguments(text)
        else:
            current.block[current.kind] = text
        self.message["content"].append(current.block)
        return [{"type": "content_block_stop", "index": index}]


def _delta(kind: str, text: str) -> dict[str, str]:
    if kind == "tool_use":
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": f"{kind}_delta", kind: text}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call, as far as they came; what is no JSON object stands as it is under "arguments"."""
    try:
        found = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def message_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The chat route's usage as Anthropic counts it: cached tokens are no part of the input tokens."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
