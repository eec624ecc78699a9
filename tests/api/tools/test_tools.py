"""What a chat request may say of tools."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_runtime.api.tools.dialect import Dialect
from stoker_runtime.api.tools.tools import FunctionSpec, ToolSpec, tool_use
from stoker_runtime.errors import RequestError

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMED_X = {"type": "function", "function": {"name": "x"}}
DIALECT = Dialect("hermes", "", True)


def tool(name: str, parameters: dict[str, Any] | None = None) -> ToolSpec:
    return ToolSpec(type="function", function=FunctionSpec(name=name, parameters=parameters, strict=True))


TOOLS = (tool("weather", CITY), tool("now"))


def test_auto_is_the_default_with_tools_and_none_without() -> None:
    use = tool_use(TOOLS, None, None, DIALECT, "{{ tools }}")
    assert (use.choice, use.parallel) == ("auto", True)
    assert tool_use(None, None, None, DIALECT, "").choice == "none"
    assert tool_use(None, "none", None, DIALECT, "").choice == "none"


def test_the_template_sees_tools_only_where_they_may_be_called() -> None:
    shown = tool_use(TOOLS[:1], "auto", False, DIALECT, "{{ tools }}").shown()
    assert shown == [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    assert tool_use(TOOLS, "none", None, DIALECT, "{{ tools }}").shown() is None


@pytest.mark.parametrize(
    ("tools", "choice", "dialect", "param", "says"),
    [
        ((), None, DIALECT, "tools", "at least one tool"),
        (None, "auto", DIALECT, "tool_choice", "only allowed when tools is set"),
        (None, {"type": "function", "function": {"name": "x"}}, DIALECT, "tool_choice", "only allowed when tools"),
        (TOOLS, {"type": "function", "function": {"name": "x"}}, DIALECT, "tool_choice", "not one of the tools"),
        (TOOLS, {"type": "function"}, DIALECT, "tool_choice", "must be"),
        (TOOLS, "any", DIALECT, "tool_choice", "must be"),
        (TOOLS, {"type": "allowed_tools"}, DIALECT, "tool_choice", "must hold a mode"),
        (
            TOOLS,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED_X]}},
            DIALECT,
            "tool_choice",
            "not one of the tools",
        ),
        (TOOLS, 5, DIALECT, "tool_choice", "must be"),
        (TOOLS, "auto", Dialect(), "tool_choice", "--tool-call-parser"),
    ],
)
def test_bad_choices(tools: Any, choice: Any, dialect: Dialect, param: str, says: str) -> None:
    with pytest.raises(RequestError) as error:
        tool_use(tools, choice, None, dialect, "{{ tools }}")
    assert error.value.param == param
    assert says in error.value.message


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_leave_those_that_they_name(mode: str) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    asked = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    use = tool_use(TOOLS, asked, None, DIALECT, "{{ tools }}")
    assert use.choice == mode
    assert list(use.schemas) == ["now"]
    assert [tool["function"]["name"] for tool in use.shown() or ()] == ["now"]


def test_a_template_without_tools_refuses_them() -> None:
    with pytest.raises(RequestError, match="no place for tools"):
        tool_use(TOOLS, None, None, DIALECT, "{{ messages }}")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_forced_call_needs_neither_parser_nor_template(choice: Any) -> None:
    use = tool_use(TOOLS, choice, None, Dialect(), "{{ messages }}")
    assert use.forced
    assert use.name == ("" if choice == "required" else "now")
