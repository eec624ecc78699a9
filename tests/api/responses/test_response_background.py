"""Responses in the background through the `openai` package: asked about, streamed, taken up again, cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from api_server import CLIENT, Running, wait_until
from calling_server import says
from fake_engine import SPOKEN

MODEL = "byte-model"


@pytest.fixture
def client(calling: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def endless(calling: Running) -> None:
    calling.engine.delay = 0.01
    calling.engine.script = lambda request: list(SPOKEN.encode() * 50)[: request.params.max_tokens]


def test_background(calling: Running, client: openai.OpenAI) -> None:
    endless(calling)
    queued = client.responses.create(model=MODEL, input="a", background=True)
    assert queued.status == "queued"
    with pytest.raises(openai.BadRequestError, match="is not finished"):
        client.responses.create(model=MODEL, input="a", previous_response_id=queued.id)
    client.responses.cancel(queued.id)
    says(calling, "Slow.")
    queued = client.responses.create(model=MODEL, input="a", background=True)
    assert wait_until(lambda: client.responses.retrieve(queued.id).status == "completed")
    assert client.responses.retrieve(queued.id).output_text == "Slow."
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=[], background=True)
    assert caught.value.param == "input"


def test_cancel(calling: Running, client: openai.OpenAI) -> None:
    endless(calling)
    queued = client.responses.create(model=MODEL, input="a", background=True)
    assert wait_until(lambda: client.responses.retrieve(queued.id).status == "in_progress")
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert len(calling.engine.aborted) == 1
    assert client.responses.retrieve(queued.id).status == "cancelled"
    says(calling, "x")
    done = client.responses.create(model=MODEL, input="a")
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.responses.cancel(done.id)


def test_streamed_as_it_is_made(calling: Running, client: openai.OpenAI) -> None:
    calling.engine.delay = 0.002
    says(calling, "Slow and steady.")
    events = list(client.responses.create(model=MODEL, input="a", background=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert events[0].response.status == "queued"  # type: ignore[union-attr]
    name = events[-1].response.id  # type: ignore[union-attr]
    assert client.responses.retrieve(name).output_text == "Slow and steady."
    again = list(client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events]
    rest = list(client.responses.retrieve(name, stream=True, starting_after=3))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[4:]]
    assert list(client.responses.retrieve(name, stream=True, starting_after=10**9)) == []


def test_taken_up_again_while_it_is_made(calling: Running, client: openai.OpenAI) -> None:
    endless(calling)
    stream = client.responses.create(model=MODEL, input="a", background=True, stream=True, max_output_tokens=80)
    first = [next(stream) for _ in range(8)]
    stream.close()
    name = first[0].response.id  # type: ignore[union-attr]
    assert client.responses.retrieve(name).status == "in_progress", "whoever leaves does not end it"
    rest = list(client.responses.retrieve(name, stream=True, starting_after=first[-1].sequence_number))
    numbers = [event.sequence_number for event in (*first, *rest)]
    assert numbers == list(range(len(numbers)))
    texts = [event.delta for event in (*first, *rest) if event.type == "response.output_text.delta"]
    assert "".join(texts) == (SPOKEN * 50)[:80]
    assert not calling.engine.aborted


def test_deleted_while_it_is_made(calling: Running, client: openai.OpenAI) -> None:
    endless(calling)
    stream = client.responses.create(model=MODEL, input="a", background=True, stream=True)
    name = next(stream).response.id  # type: ignore[union-attr]
    client.responses.delete(name)
    assert len(calling.engine.aborted) == 1
    assert all(event.type != "response.completed" for event in stream)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name)


def test_failed_in_the_background(calling: Running, client: openai.OpenAI) -> None:
    calling.engine.fail_after = 4
    *_, last = client.responses.create(model=MODEL, input="a", background=True, stream=True)
    assert last.type == "response.failed"
    found = client.responses.retrieve(last.response.id)
    assert found.error is not None
    assert (found.status, found.error.message) == ("failed", "The step failed.")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=maybe", "stream"),
        ("stream=true&starting_after=x", "starting_after"),
    ],
)
def test_what_cannot_be_streamed(calling: Running, client: openai.OpenAI, query: str, param: str) -> None:
    name = client.responses.create(model=MODEL, input="a").id
    answer = CLIENT.get(f"{calling.url}/v1/responses/{name}?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_number_that_is_none(calling: Running, client: openai.OpenAI) -> None:
    says(calling, "x")
    name = client.responses.create(model=MODEL, input="a", background=True).id
    for number in ("-1", "x", "9" * 40):
        answer: httpx.Response = CLIENT.get(
            f"{calling.url}/v1/responses/{name}", params={"stream": "true", "starting_after": number}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")


def test_nothing_is_left_over(calling: Running, client: openai.OpenAI) -> None:
    says(calling, "x")
    made: Any = [client.responses.create(model=MODEL, input="a", background=True).id for _ in range(5)]
    assert wait_until(lambda: all(client.responses.retrieve(name).status == "completed" for name in made))
    assert wait_until(lambda: not calling.app.shelf.jobs)
