"""The tools of a chat request: what may be asked, and what the template sees.

Invariants: a choice that leaves here names tools that exist and can be read back from the model's text.
Knows nothing of how models write calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from stoker_runtime.api.http.fields import Body
from stoker_runtime.api.tools.dialect import Dialect
from stoker_runtime.errors import RequestError

JsonSchema = dict[str, Any]
NO_WORDS: dict[str, Any] = {"defer_loading": True, "function": {"strict", "defer_loading"}}
"""Of a tool: what no template shows a model."""
Choice = Literal["none", "auto", "required", "named"]


class FunctionSpec(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolSpec(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionSpec
    defer_loading: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request may call. `name` is set when `choice` is "named"; `parallel`: more than one call is allowed."""

    choice: Choice = "none"
    name: str = ""
    tools: tuple[ToolSpec, ...] = ()
    parallel: bool = True
    schemas: Mapping[str, JsonSchema] = field(default_factory=dict)

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice in ("required", "named")

    def shown(self) -> list[dict[str, Any]] | None:
        """The tools as templates expect them; none when the model must not call. `strict` is no word for a model."""
        if self.choice == "none":
            return None
        return shown_tools(self.tools)


def shown_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """The tools as templates expect them."""
    return [tool.model_dump(exclude_unset=True, exclude=NO_WORDS) for tool in tools]


def tool_use(
    tools: Sequence[ToolSpec] | None, tool_choice: Any, parallel: bool | None, dialect: Dialect, template: str
) -> ToolUse:
    """What a request asks for; `template` is the source of the chat template. Raises RequestError naming the field."""
    if tools is not None and not tools:
        raise RequestError("tools must hold at least one tool; leave it out instead.", param="tools")
    if tools and isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools":
        tools, tool_choice = _allowed(tool_choice.get("allowed_tools"), tools)
    choice, name = _choice(tool_choice, tools)
    if not tools or choice == "none":
        return ToolUse()
    if choice == "auto" and not dialect.auto_tools:
        raise RequestError(
            "tool_choice 'auto' needs a server that can read this model's calls: start it with --tool-call-parser.",
            param="tool_choice",
        )
    if choice == "auto" and "tools" not in template:
        raise RequestError("This model's chat template has no place for tools.", param="tools")
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    return ToolUse(choice, name, tuple(tools), parallel is not False, schemas)


def _allowed(asked: Any, tools: Sequence[ToolSpec]) -> tuple[list[ToolSpec], str]:
    """The tools that `allowed_tools` leaves, and its mode."""
    listed = asked.get("tools") if isinstance(asked, dict) else None
    mode = asked.get("mode") if isinstance(asked, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise RequestError(
            'tool_choice.allowed_tools must hold a mode, "auto" or "required", and at least one tool.',
            param="tool_choice",
        )
    found: list[ToolSpec] = []
    for entry in listed:
        _, name = _choice(entry, tools)
        found += [tool for tool in tools if tool.function.name == name]
    return found, mode


def _choice(asked: Any, tools: Sequence[ToolSpec] | None) -> tuple[Choice, str]:
    """The choice, and the name where it is a named one."""
    if asked is None:
        return ("auto" if tools else "none"), ""
    if asked == "none":
        return "none", ""
    if not tools:
        raise RequestError("tool_choice is only allowed when tools is set.", param="tool_choice")
    if asked == "auto":
        return "auto", ""
    if asked == "required":
        return "required", ""
    function = asked.get("function") if isinstance(asked, dict) and asked.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": NAME}}.',
            param="tool_choice",
        )
    if all(tool.function.name != name for tool in tools):
        raise RequestError(f"tool_choice names {name!r}, which is not one of the tools.", param="tool_choice")
    return "named", name
