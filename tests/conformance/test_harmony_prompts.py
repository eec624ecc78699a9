"""gpt-oss over HTTP: conversations with tools, calls and reasoning become the prompts that its makers' library renders,
token by token, and a tiny random gpt-oss writes reasoning and calls that the `openai` client reads.

The template beside this module is the tests' own: models bring theirs.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import openai_harmony as harmony
import pytest
from api_server import Running, make_state, serve
from calling_server import LongEngine
from constrained_server import client_of
from test_harmony import encoding
from tests.runtime.models.test_zoo import SEED, save_random
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.text.tokenizer import BYTE_OF_CHARACTER, Tokenizer

__all__ = ["encoding"]
TEMPLATE = (Path(__file__).parent / "harmony.jinja").read_text(encoding="utf-8")
SPECIAL = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
WORDS = ("red", "fox", "Größe", "🦊", "{}", "to=functions.now", "analysis", "\n", "</think>")
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "string", "enum": ["a", "b c"]},
    {"type": "array", "items": {"type": "string"}},
)  # fmt: skip


def words(rng: random.Random) -> str:
    return f"x{' '.join(rng.choices(WORDS, k=rng.randint(0, 4)))}x"


def drawn_tools(rng: random.Random) -> list[dict[str, Any]]:
    def tool(name: str) -> dict[str, Any]:
        described = {f"p{at}": rng.choice(KINDS) | ({"description": f"of {at}"} if rng.random() < 0.5 else {})
                     for at in range(rng.randint(0, 3))}  # fmt: skip
        required = [each for each in described if rng.random() < 0.5]
        schema = {"parameters": {"type": "object", "properties": described, "required": required}} if described else {}
        return {"type": "function", "function": {"name": name, "description": f"Does {name}.", **schema}}

    return [tool(name) for name in rng.sample(("now", "get_weather", "f3"), rng.randint(1, 3))]


def drawn(rng: random.Random) -> dict[str, Any]:
    """A conversation whose last word is a user's or a tool's."""
    tools = drawn_tools(rng) if rng.random() < 0.7 else []
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.6:
        messages.append({"role": rng.choice(["system", "developer"]), "content": words(rng)})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": words(rng)})
        for at in range(rng.randint(0, 2) if tools else 0):
            name = rng.choice(tools)["function"]["name"]
            function = {"name": name, "arguments": json.dumps({words(rng): rng.randrange(9)}, ensure_ascii=False)}
            call = {"id": f"call_{at}", "type": "function", "function": function}
            # Reasoning, what is said aloud, or neither; both stand in one message of analysis.
            texts = rng.choice([{}, {"reasoning": words(rng)}, {"reasoning": words(rng), "content": words(rng)}])
            messages.append({"role": "assistant", "tool_calls": [call], **texts})
            messages.append({"role": "tool", "tool_call_id": f"call_{at}", "content": words(rng)})
        if rng.random() < 0.5:
            messages.append({"role": "assistant", "content": words(rng), "reasoning": words(rng)})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": words(rng)})
    effort = rng.choice(["low", "medium", "high"])
    return {"model": "byte-model", "messages": messages, "tools": tools or None, "reasoning_effort": effort}


def expected(body: dict[str, Any]) -> harmony.Conversation:
    """The same as the library has it; thoughts of turns that ended are dropped, as the format's guide asks."""
    effort = harmony.ReasoningEffort(body["reasoning_effort"].title())
    system = harmony.SystemContent.new().with_reasoning_effort(effort)
    system = system.with_conversation_start_date(datetime.now().strftime("%Y-%m-%d"))
    messages, told = list(body["messages"]), harmony.DeveloperContent.new()
    found = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
    if messages[0]["role"] in ("system", "developer"):
        told = told.with_instructions(messages.pop(0)["content"])
    if body["tools"]:
        told = told.with_function_tools(
            [harmony.ToolDescription.new(each["name"], each["description"], parameters=each.get("parameters"))
             for each in (tool["function"] for tool in body["tools"])]
        )  # fmt: skip
    if told.instructions or body["tools"]:
        found.append(harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, told))

    def assistant(text: str, channel: str) -> harmony.Message:
        return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)

    said_all = [at for at, each in enumerate(messages) if each["role"] == "assistant" and not each.get("tool_calls")]
    called = ""
    for at, each in enumerate(messages):
        if each["role"] == "user":
            found.append(harmony.Message.from_role_and_content(harmony.Role.USER, each["content"]))
        elif each["role"] == "tool":
            author = harmony.Author.new(harmony.Role.TOOL, f"functions.{called}")
            said = harmony.Message.from_author_and_content(author, each["content"])
            found.append(said.with_recipient("assistant").with_channel("commentary"))
        elif each.get("tool_calls"):
            late = not said_all or at > said_all[-1]
            thoughts = [each[key] for key in ("reasoning", "content") if key in each and late]
            found += [assistant("\n".join(thoughts), "analysis")] if thoughts else []
            function = each["tool_calls"][0]["function"]
            called = function["name"]
            call = assistant(function["arguments"], "commentary")
            found.append(call.with_recipient(f"functions.{called}").with_content_type("json"))
        else:
            found.append(assistant(each["content"], "final"))
    return harmony.Conversation.from_messages(found)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    engine = LongEngine()
    yield from serve(make_state(engine, TEMPLATE), engine)


def test_prompts_are_those_of_the_library(running: Running, encoding: Any) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    with httpx.Client(base_url=running.url) as client:
        for _ in range(60):
            body = drawn(rng)
            answer = client.post("/v1/chat/completions/render", json=body)
            assert answer.status_code == 200, answer.text
            prompt = bytes(answer.json()["token_ids"]).decode()
            tokens = encoding.render_conversation_for_completion(expected(body), harmony.Role.ASSISTANT)
            assert prompt == encoding.decode(tokens)
            assert encoding.encode(prompt, allowed_special="all") == tokens


CHOICES = ("Zürich", "Oslo 🙂", 'a "b"')
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Ask.", "parameters": {
        "type": "object", "properties": {"city": {"enum": list(CHOICES)}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "description": "Tell."}},
]  # fmt: skip


def save_tokenizer(folder: Path) -> Tokenizer:
    """Bytes, and the format's tokens."""
    rust = RustTokenizer(models.BPE(dict(BYTE_OF_CHARACTER), []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(str(folder))


async def test_a_tiny_gpt_oss_reasons_and_calls(tmp_path: Path) -> None:
    """Forced to call, a model of random weights writes noise as its thoughts, or none, and then what a tool takes."""
    print(f"seed {SEED}")
    bytes_and_more = save_tokenizer(tmp_path)
    ends = [bytes_and_more.token_to_id(name) for name in ("<|return|>", "<|call|>")]
    save_random("GptOssForCausalLM", tmp_path, vocab_size=256 + len(SPECIAL), max_position_embeddings=4096,
                eos_token_id=ends)  # fmt: skip
    config = EngineConfig(str(tmp_path), device="cpu", max_model_len=2000, max_num_seqs=4)
    messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "How is it there?"}]
    async with (
        await AsyncEngine.start(config, log_level="error") as engine,
        client_of(engine, bytes_and_more, TEMPLATE) as client,
    ):
        # "analysis" or "commentary", and not too far from the end of a thought.
        end, ways = bytes_and_more.token_to_id("<|end|>"), [bytes_and_more.token_to_id(first) for first in "ac"]
        asked = [
            client.chat.completions.create(
                model="byte-model", messages=messages, tools=TOOLS, tool_choice="required", seed=SEED + at,
                max_tokens=300, temperature=2.0, logit_bias={str(end): 40, str(ways[at % 2]): 45}, logprobs=True,
            )
            for at in range(4)
        ]  # fmt: skip
        for at, answer in enumerate(await asyncio.gather(*asked)):
            [choice] = answer.choices
            assert choice.logprobs is not None
            pieces = [bytes(each.bytes or ()) for each in choice.logprobs.content or ()]
            written = b"".join(pieces).decode(errors="replace")
            thought, ended, _ = written.removeprefix("<|channel|>analysis<|message|>").partition("<|end|>")
            assert bool(ended) == (at % 2 == 0), written
            assert choice.finish_reason == "tool_calls", written
            assert not choice.message.content
            assert (getattr(choice.message, "reasoning", None) or "") == (thought if ended else "")
            [call] = choice.message.tool_calls or []
            assert call.type == "function"
            assert f"to=functions.{call.function.name} <|constrain|>json<|message|>" in written
            arguments = json.loads(call.function.arguments)
            assert arguments == {} if call.function.name == "now" else arguments["city"] in CHOICES
        said = {"role": "assistant", "reasoning": "I look.", "tool_calls": [call.model_dump()]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "mild"}
        rendered = await client.post(
            "/chat/completions/render", cast_to=httpx.Response,
            body={"model": "byte-model", "messages": [*messages, said, result], "tools": TOOLS},
        )  # fmt: skip
    prompt = bytes_and_more.decode(rendered.json()["token_ids"], skip_special=False)
    assert "<|start|>assistant<|channel|>analysis<|message|>I look.<|end|>" in prompt
    assert prompt.endswith("to=assistant<|channel|>commentary<|message|>mild<|end|><|start|>assistant")
