"""The kinds of request that a soak mixes, each with what its answer must be.

Invariants: a kind raises Wrong, Full, or what a broken connection raises; what it made on the server it deletes. A
kind that leaves, leaves its connection too.
Knows nothing of how many run at a time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from stoker_runtime.bench.soak.tally import Sampled
from stoker_runtime.bench.soak.visit import Failed, Visit, Wrong, check_count, expect
from stoker_runtime.bench.soak.wire import Begun

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEPT_TEXTS = 64
SLOW_SECONDS = 0.1
BATCH_PATIENCE_SECONDS = 300.0
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Lima", "Pune"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "mood": {"enum": ["calm", "glad"]}},
    "required": ["sure", "mood"],
    "additionalProperties": False,
}


async def _begin(visit: Visit, path: str, body: dict[str, Any], *, slow: bool = False) -> Begun:
    """The stream of an answer. Raises as `expect`."""
    begun = await visit.wire.begin("POST", path, body, slow=slow)
    if begun.status != 200:
        expect(await begun.rest())
    return begun


async def _read(visit: Visit, begun: Begun, asked: int, *, pause: float = 0.0, gaps: bool = False) -> str:
    """Read a stream of completions to its end; its text. Raises Wrong."""
    text, finish, usage, last, done = "", None, None, 0.0, False
    async for data in begun.events(pause):
        if (done := data == "[DONE]") or not data:
            continue
        now, event = time.perf_counter(), json.loads(data)
        if "error" in event:
            raise Failed(f"an error in the stream: {event['error']['message']}")
        for choice in event["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish = choice["finish_reason"] or finish
        if event["choices"] and gaps:
            if last:
                visit.gap(now - last)
            last = now
        usage = event.get("usage") or usage
    if not done or usage is None:
        raise Wrong("the stream ended without usage or [DONE]")
    check_count(usage, asked, finish)
    visit.tally.tokens += usage["completion_tokens"]
    return text


async def stream(visit: Visit) -> None:
    """A streamed completion of token ids; its gaps are measured."""
    body = visit.body(prompt=visit.prompt(), ignore_eos=True, stream=True, stream_options={"include_usage": True})
    await _read(visit, await _begin(visit, COMPLETIONS, body), body["max_tokens"], gaps=True)


async def whole(visit: Visit) -> None:
    """A completion in one piece; seeded texts are kept, to be generated again alone."""
    body = visit.body(prompt=visit.prompt())
    found = expect(await visit.wire.ask("POST", COMPLETIONS, body))
    (choice,) = found["choices"]
    check_count(found["usage"], body["max_tokens"], choice["finish_reason"])
    visit.tally.tokens += found["usage"]["completion_tokens"]
    if "seed" in body:
        texts = visit.tally.texts
        # The newest ones too: the last place is given again and again.
        texts[KEPT_TEXTS - 1 :] = [Sampled(body, choice["text"], choice["finish_reason"])]


async def several(visit: Visit) -> None:
    """Several answers to one prompt."""
    count = visit.draw.randint(2, 5)
    found = expect(await visit.wire.ask("POST", COMPLETIONS, visit.body(prompt=visit.words(), n=count, logprobs=2)))
    if len(found["choices"]) != count:
        raise Wrong(f"{len(found['choices'])} choices of {count}")


async def chat(visit: Visit) -> None:
    """A streamed chat."""
    messages = [{"role": "user", "content": visit.words()}]
    body = visit.body(messages=messages, stream=True, stream_options={"include_usage": True})
    await _read(visit, await _begin(visit, CHAT, body), body["max_tokens"])


async def hang_up(visit: Visit) -> None:
    """A client that leaves: in its own body, before the answer, or in the middle of it."""
    body = visit.body(prompt=visit.prompt(), stream=True, ignore_eos=True) | {"max_tokens": visit.facts.most_output}
    try:
        match visit.draw.randrange(3):
            case 0:
                data = json.dumps(body).encode()
                await visit.wire.send_part(COMPLETIONS, len(data), data[: visit.draw.randrange(len(data))])
            case 1:
                data = json.dumps(body).encode()
                await visit.wire.send_part(COMPLETIONS, len(data), data)
                await asyncio.sleep(visit.draw.random() * 0.2)
            case _:
                begun, left = await _begin(visit, COMPLETIONS, body), visit.draw.randint(1, 8)
                async for _ in begun.events():
                    if (left := left - 1) == 0:
                        break
    finally:
        visit.wire.leave()


async def slow_reader(visit: Visit) -> None:
    """A client that reads as if over a thin line, and gets everything in the end."""
    body = visit.body(prompt=visit.words(), ignore_eos=True, stream=True, stream_options={"include_usage": True})
    body["max_tokens"] = min(body["max_tokens"], 24)
    try:
        begun = await _begin(visit, COMPLETIONS, body, slow=True)
        await _read(visit, begun, body["max_tokens"], pause=SLOW_SECONDS)
    finally:
        visit.wire.leave()


async def bad_body(visit: Visit) -> None:
    """A body that no server should take: the answer is an error of the caller's, in JSON."""
    draw, model = visit.draw, visit.facts.model
    bodies: tuple[object, ...] = (
        b"{",
        b"\xff\xfe" * draw.randint(1, 500),
        b"[" * draw.randint(2000, 50_000),
        {"model": model, "prompt": "1", "max_tokens": -draw.randint(1, 99)},
        {"model": model, "prompt": [2**40 + draw.randrange(99)], "max_tokens": 1},
        {"model": model, "prompt": "1", "temperature": "warm"},
        {"model": model, "prompt": "1", f"tempature{draw.randrange(99)}": 1},
        {"model": f"no-{draw.randrange(99)}", "prompt": "1"},
        {"model": model, "prompt": draw.choices(visit.facts.ids, k=visit.facts.holds + draw.randint(1, 99))},
        {"model": model, "prompt": "1", "response_format": {"type": "json_schema", "json_schema": {"name": 3}}},
    )
    answer = await visit.wire.ask("POST", COMPLETIONS, draw.choice(bodies))
    if not 400 <= answer.status < 500 or answer.status == 429:
        kind = Failed if answer.status >= 500 else Wrong
        raise kind(f"status {answer.status} for a body that is wrong: {answer.said}")
    if "error" not in answer.content:
        raise Wrong(f"an error without a message: {answer.said}")


async def tools(visit: Visit) -> None:
    """A forced call: its arguments fit the schema, unless the tokens ended first."""
    messages = [{"role": "user", "content": visit.words()}]
    body = visit.body(messages=messages, tools=[WEATHER], tool_choice="required") | {"max_tokens": 96}
    (choice,) = expect(await visit.wire.ask("POST", CHAT, body))["choices"]
    if choice["finish_reason"] == "length":
        return
    for call in choice["message"]["tool_calls"] or [{"function": {"name": "none", "arguments": "{}"}}]:
        said = json.loads(call["function"]["arguments"])
        if call["function"]["name"] != "weather" or set(said) != {"city", "days"}:
            raise Wrong(f"a call that the tool does not allow: {call['function']}")


async def schema(visit: Visit) -> None:
    """A text bound by a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA, "strict": True}}
    body = visit.body(messages=[{"role": "user", "content": visit.words()}], response_format=form) | {"max_tokens": 64}
    (choice,) = expect(await visit.wire.ask("POST", CHAT, body))["choices"]
    if choice["finish_reason"] == "stop":
        said = json.loads(choice["message"]["content"])
        if set(said) != {"sure", "mood"} or not isinstance(said["sure"], bool):
            raise Wrong(f"a text that its schema does not allow: {said}")


async def session(visit: Visit) -> None:
    """Turns of one conversation under one session id, each with the words of those before."""
    name, messages = f"soak-{visit.draw.randrange(2**40)}", list[dict[str, str]]()
    for _ in range(visit.draw.randint(2, 4)):
        messages.append({"role": "user", "content": visit.words(4)})
        body = visit.body(messages=messages, session_id=name) | {"max_tokens": 8}
        (choice,) = expect(await visit.wire.ask("POST", CHAT, body))["choices"]
        messages.append({"role": "assistant", "content": choice["message"]["content"] or ""})


async def stored(visit: Visit) -> None:
    """A stored response, one that continues it, and the end of both."""
    made: list[str] = []
    try:
        for _ in range(2):
            body = {"model": visit.facts.model, "input": visit.words(4), "max_output_tokens": 8}
            more = {"previous_response_id": made[-1]} if made else {}
            made.append(expect(await visit.wire.ask("POST", "/v1/responses", body | more))["id"])
    finally:
        for name in made:
            gone = await visit.wire.ask("DELETE", f"/v1/responses/{name}")
            if gone.status != 404:
                expect(gone)


async def batch(visit: Visit) -> None:
    """A batch of a few lines, its results, and the end of its files."""
    count, wire = visit.draw.randint(1, 6), visit.wire
    lines = [{"custom_id": str(at), "method": "POST", "url": COMPLETIONS} for at in range(count)]
    bodies = [visit.body(prompt=visit.words()) for _ in lines]
    content = "".join(json.dumps(line | {"body": body}) + "\n" for line, body in zip(lines, bodies, strict=True))
    files = [await upload(visit, content.encode())]
    try:
        asked = {"input_file_id": files[0], "endpoint": COMPLETIONS, "completion_window": "24h"}
        name = expect(await wire.ask("POST", "/v1/batches", asked))["id"]
        found = await _finished(visit, name)
        files += [found[key] for key in ("output_file_id", "error_file_id") if found.get(key)]
        if found["status"] != "completed" or found["request_counts"]["total"] != count:
            raise Wrong(f"a batch of {count} lines came to {found['status']}: {found['request_counts']}")
    finally:
        for file in files:
            expect(await wire.ask("DELETE", f"/v1/files/{file}"))


async def upload(visit: Visit, content: bytes) -> str:
    """The id of a new file. Raises as `expect`."""
    edge = f"soak{visit.draw.randrange(2**60)}"
    part = f'--{edge}\r\ncontent-disposition: form-data; name="{{}}"{{}}\r\n\r\n'
    form = part.format("purpose", "").encode() + b"batch\r\n"
    form += part.format("file", '; filename="in.jsonl"').encode() + content + f"\r\n--{edge}--\r\n".encode()
    answer = await visit.wire.ask("POST", "/v1/files", form, f"multipart/form-data; boundary={edge}")
    return str(expect(answer)["id"])


async def _finished(visit: Visit, name: str) -> Any:
    deadline = time.monotonic() + BATCH_PATIENCE_SECONDS
    while True:
        found = expect(await visit.wire.ask("GET", f"/v1/batches/{name}"))
        if found["status"] in ("completed", "failed", "expired", "cancelled"):
            return found
        if time.monotonic() > deadline:
            raise Wrong(f"a batch is {found['status']} after {BATCH_PATIENCE_SECONDS:.0f} s")
        await asyncio.sleep(0.25)


class Kind(NamedTuple):
    """One kind: how often it is drawn among the others, and what it does."""

    weight: int
    run: Callable[[Visit], Awaitable[None]]


KINDS = {
    "stream": Kind(30, stream),
    "whole": Kind(14, whole),
    "several": Kind(4, several),
    "chat": Kind(10, chat),
    "hang-up": Kind(12, hang_up),
    "slow reader": Kind(4, slow_reader),
    "bad body": Kind(12, bad_body),
    "tools": Kind(4, tools),
    "schema": Kind(4, schema),
    "session": Kind(3, session),
    "stored": Kind(3, stored),
    "batch": Kind(1, batch),
}
