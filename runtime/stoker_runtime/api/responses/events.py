"""A response as it grows: chat deltas in, the typed events of the Responses API out, and the whole response.

Invariants: every event has the next sequence number; every item is added, filled and done before the next begins; a
response that was streamed equals the one that was not, because both grow here; a whole answer is one large delta.
Knows nothing of engines, requests or stores.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
TEXT_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
CUT = ("length", "abort")
"""Reasons for which a text is not whole."""


@dataclass(slots=True)
class _Open:
    """The item that is being written; `key` tells calls apart."""

    kind: str
    key: object
    item: dict[str, Any]
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ResponseBuilder:
    """One response. `response` is the object as it stands; its output holds the items that are done."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._sequence = 0
        self._open: _Open | None = None
        self._logprobs: list[Any] = []

    def begin(self) -> list[Event]:
        """The response exists, and the engine works on it."""
        created = self._event("response.created", response=self._snapshot())
        self.response["status"] = "in_progress"
        return [created, self._event("response.in_progress", response=self._snapshot())]

    def add(self, delta: Mapping[str, Any], logprobs: Sequence[Any] = ()) -> list[Event]:
        """What one delta of the chat route says: reasoning, then content, then calls."""
        events: list[Event] = []
        self._logprobs += logprobs
        if reasoning := delta.get("reasoning"):
            events += self._write("reasoning", None, reasoning)
        if content := delta.get("content"):
            events += self._write("message", None, content)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            opening = {"call_id": call.get("id"), "name": function.get("name")}
            events += self._write("function_call", call["index"], function.get("arguments") or "", opening)
        return events

    def close(self, reason: str) -> list[Event]:
        """Finish the last item; an answer of nothing is an empty message."""
        events = [] if self.response["output"] or self._open else self._write("message", None, "")
        return events + self._close("incomplete" if reason in CUT else "completed")

    def finish(self, reason: str, usage: Mapping[str, Any]) -> Event:
        """The end that the engine came to, after `close`."""
        self.response["usage"] = dict(usage)
        if reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._end("incomplete" if reason in CUT else "completed")

    def fail(self, error: Mapping[str, Any]) -> list[Event]:
        """The end that an error made."""
        events = self._close("incomplete")
        self.response["error"] = {"code": error.get("code") or error["type"], "message": error["message"]}
        return [*events, self._end("failed")]

    def cancel(self) -> None:
        """The end that the client wanted; nobody reads events of it."""
        self._close("incomplete")
        self.response["status"] = "cancelled"

    def _write(self, kind: str, key: object, text: str, opening: Mapping[str, Any] | None = None) -> list[Event]:
        events: list[Event] = []
        if self._open is None or (self._open.kind, self._open.key) != (kind, key):
            events += [*self._close("completed"), *self._begin_item(kind, key, opening or {})]
        current = self._open
        assert current is not None
        if text:
            current.pieces.append(text)
            fields: dict[str, Any] = {**self._place(current), "delta": text}
            if kind == "message":
                fields["logprobs"], self._logprobs = self._logprobs, []
                current.logprobs += fields["logprobs"]
            events.append(self._event(f"{_stem(kind)}.delta", **fields))
        return events

    def _begin_item(self, kind: str, key: object, opening: Mapping[str, Any]) -> list[Event]:
        item: dict[str, Any] = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {**opening, "arguments": ""}
        else:
            item["content"] = []
            if kind == "message":
                item["role"] = "assistant"
            else:
                item |= {"summary": [], "encrypted_content": None}
        current = self._open = _Open(kind, key, item, len(self.response["output"]))
        events = [self._event("response.output_item.added", output_index=current.index, item=dict(item))]
        if kind in TEXT_PARTS:
            part = _part(kind, "", [])
            events.append(self._event("response.content_part.added", **self._place(current), part=part))
        return events

    def _close(self, status: str) -> list[Event]:
        """Finish the open item, if there is one."""
        current, self._open = self._open, None
        if current is None:
            return []
        text, place = "".join(current.pieces), self._place(current)
        if current.kind == "function_call":
            current.item["arguments"] = text
            done = {"arguments": text, "name": current.item["name"]}
            events = [self._event("response.function_call_arguments.done", **place, **done)]
        else:
            if current.kind == "message":
                current.logprobs += self._logprobs
                self._logprobs = []
            part = _part(current.kind, text, current.logprobs)
            current.item["content"] = [part]
            more = {"logprobs": current.logprobs} if current.kind == "message" else {}
            events = [
                self._event(f"{_stem(current.kind)}.done", **place, text=text, **more),
                self._event("response.content_part.done", **place, part=part),
            ]
        current.item["status"] = status
        self.response["output"].append(current.item)
        return [*events, self._event("response.output_item.done", output_index=current.index, item=current.item)]

    def _end(self, status: str) -> Event:
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return self._event(f"response.{status}", response=self.response)

    def _place(self, current: _Open) -> dict[str, Any]:
        place = {"item_id": current.item["id"], "output_index": current.index}
        return place | {"content_index": 0} if current.kind in TEXT_PARTS else place

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": list(self.response["output"])}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _stem(kind: str) -> str:
    """What the events of an item's text are called."""
    return "response.function_call_arguments" if kind == "function_call" else f"response.{TEXT_PARTS[kind]}"


def _part(kind: str, text: str, logprobs: list[Any]) -> dict[str, Any]:
    part: dict[str, Any] = {"type": TEXT_PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": logprobs} if kind == "message" else part


def response_usage(usage: Mapping[str, Any], reasoning_tokens: int) -> dict[str, Any]:
    """The chat route's usage in the words of the Responses API."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }
