"""prefix.py: the script that Envoy runs, in a Lua of its kind."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from lupa import luajit20 as lua

from stoker_operator.gateway.prefix import HEADER, SCRIPT

SYSTEM = {
    "role": "system",
    "content": 'Write "}]" at the end, {"role": "assistant"} nowhere, \\\\" and \\\\.\\\\',
}
HELLO = {"role": "user", "content": 'What is "messages": [ in JSON?'}


def key(body: Any, headers: dict[str, str] | None = None) -> str | None:
    """What the script says of a body, which may be raw."""
    runtime = lua.LuaRuntime(unpack_returned_tuples=True, encoding="latin-1")
    runtime.execute(SCRIPT)
    raw = body if isinstance(body, str) else json.dumps(body)
    runtime.globals().raw, runtime.globals().found = raw.encode().decode("latin-1"), runtime.table_from(headers or {})
    runtime.execute(
        """
        local kept = {
          remove = function(_, name) found[name] = nil end,
          add = function(_, name, value) found[name] = value end,
        }
        local buffer = {
          length = function() return #raw end,
          getBytes = function(_, from, count) return raw:sub(from + 1, from + count) end,
        }
        envoy_on_request({headers = function() return kept end, body = function() return buffer end})
        """
    )
    said = runtime.globals().found[HEADER]
    return None if said is None else str(said)


def chat(*messages: dict[str, str], **others: Any) -> dict[str, Any]:
    return {"messages": list(messages), **others}


def test_all_turns_of_a_conversation_have_one_key() -> None:
    turns = [SYSTEM, {"role": "user", "content": f"ünï {random.random()}"}]
    keys = set()
    for turn in range(4):
        keys.add(key(chat(*turns, model="m", temperature=turn)))
        turns += [{"role": "assistant", "content": f"}}] {turn}"}, {"role": "user", "content": "go on"}]
    assert len(keys) == 1
    assert keys != {key(chat(SYSTEM, {"role": "user", "content": "another"}))}


@pytest.mark.parametrize("name", ["prompt", "input"])
def test_prompts_that_begin_alike_have_one_key(name: str) -> None:
    begins = "".join(random.choices("abc ", k=300))
    assert (
        key({"model": "m", name: begins + "x"}) == key({"model": "m", name: begins + "y"}) != key({name: "z" + begins})
    )


def test_what_it_does_not_understand_has_none_and_a_clients_own_is_dropped() -> None:
    assert [key(body) for body in ("", "{", "[]", {"model": "m"})] == [None] * 4
    assert key({"model": "m"}, {HEADER: "mine"}) is None
    forged = key(chat(HELLO), {HEADER: "mine"})
    assert forged == key(chat(HELLO))
    assert forged is not None
    assert len(forged) == 8


def test_it_looks_at_no_more_than_it_says() -> None:
    long = "y" * 3000
    assert key(chat({"role": "user", "content": long})) == key(chat({"role": "user", "content": long + "z"}))
    late = {"padding": "x" * 70_000, "messages": [HELLO]}
    assert key(late) is None
