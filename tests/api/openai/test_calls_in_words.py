"""Calls of models that begin them with words, over HTTP: whole, streamed, and back in a conversation."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_server import Running, make_state, serve, stream
from calling_server import LongEngine, prompt, says
from chat_templates import COMMAND_R, GLM4, GLM4_OF_2024, PHI4_MINI

PATH = "/v1/chat/completions"
SEED = random.SystemRandom().getrandbits(32)
TEMPLATES = {"glm4": GLM4, "glm4_of_2024": GLM4_OF_2024, "command_r": COMMAND_R}


@pytest.fixture(scope="module", params=list(TEMPLATES))
def speaking(request: pytest.FixtureRequest) -> Iterator[tuple[str, Running]]:
    engine = LongEngine()
    for running in serve(make_state(engine, TEMPLATES[request.param]), engine):
        yield request.param, running


def spelled(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """`calls` as the model writes them, after a few words."""
    if family == "command_r":
        actions = [{"tool_name": name, "parameters": values} for name, values in calls]
        return f"I look.\nAction: ```json\n{json.dumps(actions, indent=4)}\n```"
    turns = "<|assistant|>".join(f"{name}\n{json.dumps(values)}" for name, values in calls)
    return f"I look.\n{turns}"


def test_calls_are_read_and_go_back_in(speaking: tuple[str, Running]) -> None:
    family, server = speaking
    source = random.Random(SEED)
    one, other = source.sample(["look_up", "look", "wetter.heute", "heure-du-jour"], 2)
    calls: list[tuple[str, dict[str, Any]]] = [(one, {"city": source.choice(["Köln", "a\nb", "{"])}), (other, {})]
    tools = [{"type": "function", "function": {"name": name, "description": f"of {name}"}} for name in (one, other)]
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    says(server, spelled(family, calls))
    with httpx.Client(base_url=server.url, timeout=10) as http:
        choice = http.post(PATH, json=asked).json()["choices"][0]
        message = choice["message"]
        functions = [each["function"] for each in message["tool_calls"]]
        found = [(each["name"], json.loads(each["arguments"])) for each in functions]
        assert (message["content"], found, choice["finish_reason"]) == ("I look.", calls, "tool_calls"), SEED
        assert one in prompt(server)
        events = [event["choices"][0] for event in stream(http, PATH, **asked)]
        assert "".join(event["delta"].get("content") or "" for event in events) == "I look."
        assert events[-1]["finish_reason"] == "tool_calls"
        results = [
            {"role": "tool", "tool_call_id": each["id"], "content": f"{at} degrees"}
            for at, each in enumerate(message["tool_calls"])
        ]
        messages = [*asked["messages"], message, *results]
        assert http.post(PATH, json={**asked, "messages": messages}).status_code == 200
    _, _, told = prompt(server).partition("I look.")
    assert "1 degrees" in told
    if family == "command_r":
        shown = json.loads(told.partition("```json")[2].partition("```")[0])
        assert [(each["tool_name"], each["parameters"]) for each in shown] == calls
    else:
        turns = [f"<|assistant|>{name}\n{json.dumps(values, ensure_ascii=False)}" for name, values in calls]
        assert told == "".join([*turns, "<|observation|>\n0 degrees<|observation|>\n1 degrees<|assistant|>"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=["any", "one"])
def test_forced_calls_are_what_they_were(speaking: tuple[str, Running], choice: Any) -> None:
    _, server = speaking
    says(server, '[{"name": "look", "parameters": {}}]' if choice == "required" else "{}")
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice}
    with httpx.Client(base_url=server.url, timeout=10) as http:
        message = http.post(PATH, json=body).json()["choices"][0]["message"]
    assert [each["function"] for each in message["tool_calls"]] == [{"name": "look", "arguments": "{}"}]


def test_an_answer_with_a_name_is_an_answer(speaking: tuple[str, Running]) -> None:
    _, server = speaking
    text = "Use it so:\nlook\nor, in code:\nlook\n{ at: 1 }\nAction: none."
    says(server, text)
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    with httpx.Client(base_url=server.url, timeout=10) as http:
        choice = http.post(PATH, json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_tools_that_a_template_joins_as_text_reach_the_prompt() -> None:
    """As Phi-4-mini's reads them: as text, from the system's message, which there was none of."""
    engine = LongEngine()
    tools = [{"type": "function", "function": {"name": "look_up", "description": "für alles"}}]
    for server in serve(make_state(engine, PHI4_MINI), engine):
        says(server, "So.")
        with httpx.Client(base_url=server.url, timeout=10) as http:
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
            assert http.post(PATH, json=body).status_code == 200
        told = prompt(server).partition("<|tool|>")[2].partition("<|/tool|>")[0]
        assert [each["function"]["name"] for each in json.loads(told)] == ["look_up"]
        assert "für alles" in told
