"""Structured output through the whole server: fields, refusals, and answers of an engine process on random tokens."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
import pytest_asyncio
from api_server import Running
from constrained_server import constrained_client
from pydantic import BaseModel, Field

from stoker_runtime.request import ConstraintKind

USER = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA, "strict": True}}
TAGS = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        ({"response_format": {"type": "json_object"}}, ConstraintKind.JSON_SCHEMA, '"object"'),
        ({"response_format": FORMAT}, ConstraintKind.JSON_SCHEMA, "Paris"),
        ({"response_format": TAGS}, ConstraintKind.GRAMMAR, "</f>"),
        ({"structured_outputs": {"json": SCHEMA}}, ConstraintKind.JSON_SCHEMA, "Paris"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ConstraintKind.JSON_SCHEMA, "Paris"),
        ({"structured_outputs": {"json_object": True}}, ConstraintKind.JSON_SCHEMA, "object"),
        ({"structured_outputs": {"regex": "a+"}}, ConstraintKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ConstraintKind.GRAMMAR, '"a" | "b"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ConstraintKind.GRAMMAR, "root"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, ConstraintKind.GRAMMAR, "</f>"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, ConstraintKind.JSON_SCHEMA, "false"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, ConstraintKind.JSON_SCHEMA, "[ ]?"),
        ({"guided_regex": "a+", "guided_decoding_backend": "guidance"}, ConstraintKind.REGEX, "a+"),
        ({"guided_choice": ["a"]}, ConstraintKind.GRAMMAR, '"a"'),
        ({"guided_grammar": 'start: "a"'}, ConstraintKind.GRAMMAR, "start"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_fields(
    server: Running, http: httpx.Client, path: str, body: dict[str, Any], kind: ConstraintKind, says: str
) -> None:
    prompt = {"messages": USER} if "chat" in path else {"prompt": "hi"}
    response = http.post(path, json={**prompt, **body, "max_tokens": 1})
    assert response.status_code == 200, response.text
    constraint = server.engine.requests[-1].params.constraint
    assert constraint is not None
    assert constraint.kind is kind
    assert says in constraint.text


def test_text_asks_for_nothing(server: Running, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a", "response_format": {"type": "text"}, "max_tokens": 1})
    assert server.engine.requests[-1].params.constraint is None


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            '"not"',
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "'structures'"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "exclude each other",
        ),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice", "exclude each other"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "did you mean regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed character class"),
        ({"guided_grammar": 'start: "a" b'}, "guided_grammar", 'unknown name: "b"'),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "3"}, "guided_json", "must be a JSON schema"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only allowed with guided_json"),
        ({"structural_tag": "[]"}, "structural_tag", "must be an object"),
    ],
)
def test_refusals(http: httpx.Client, body: dict[str, Any], param: str, says: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1, **body})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert says in error["message"]


class Town(BaseModel):
    """What a person writes for `.parse()`."""

    kind: Literal["village", "city"]
    size: int = Field(ge=0, le=99)
    tags: list[Literal["old", "new"]] = Field(max_length=2)
    mayor: bool | None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with constrained_client() as found:
        yield found


@pytest.mark.asyncio(loop_scope="module")
class TestAnswers:
    """The `openai` package, unmodified."""

    async def test_parse(self, client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.parse(
            model="byte-model", messages=USER, response_format=Town, max_tokens=2000, seed=1
        )
        assert isinstance(answer.choices[0].message.parsed, Town)
        assert answer.choices[0].finish_reason == "stop"

    async def test_choices_streamed_and_whole_agree(self, client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "byte-model", "messages": USER, "n": 3, "seed": 7, "max_tokens": 2000}
        whole = await client.chat.completions.create(**asked, response_format=FORMAT)
        texts = [choice.message.content for choice in whole.choices]
        streamed = ["", "", ""]
        finishes = []
        async for chunk in await client.chat.completions.create(**asked, response_format=FORMAT, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
                finishes += [choice.finish_reason] if choice.finish_reason else []
        assert streamed == texts
        assert finishes == ["stop"] * 3
        assert len(set(texts)) > 1
        for text in texts:
            jsonschema.validate(json.loads(text or ""), SCHEMA)

    async def test_json_object(self, client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(
            model="byte-model", messages=USER, response_format={"type": "json_object"}, max_tokens=300, seed=3
        )
        content = answer.choices[0].message.content or ""
        assert content.startswith("{")
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(content), dict)

    async def test_completion_with_logprobs_and_usage(self, client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(
            model="byte-model", prompt=["a", "b"], max_tokens=50, logprobs=0, extra_body={"guided_regex": "[0-9]{4}"}
        )
        for choice in answer.choices:
            assert re.fullmatch("[0-9]{4}", choice.text)
            assert choice.finish_reason == "stop"
            assert choice.logprobs is not None
            assert choice.logprobs.tokens == list(choice.text)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8

    async def test_stop_string_cuts(self, client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(
            model="byte-model", prompt="a", max_tokens=50, stop="-", extra_body={"guided_regex": "[0-9]{3}-[0-9]{9}"}
        )
        assert re.fullmatch("[0-9]{3}", answer.choices[0].text)

    async def test_a_dead_end_is_the_requests_fault_and_says_so(self, client: openai.AsyncOpenAI) -> None:
        # This model's vocabulary ends before the first byte of the text.
        with pytest.raises(openai.BadRequestError, match="no token of this model may follow") as caught:
            await client.completions.create(
                model="byte-model", prompt="a", max_tokens=9, extra_body={"guided_choice": ["\U0010ffff"]}
            )
        assert caught.value.code == "constraint_unmet"

    async def test_answers_go_on_after_errors(self, client: openai.AsyncOpenAI) -> None:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model="byte-model", prompt=f"{at}", max_tokens=40, extra_body={"guided_choice": ["left", "right"]}
                )
                for at in range(20)
            )
        )
        assert {answer.choices[0].text for answer in answers} == {"left", "right"}
