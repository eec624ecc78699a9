"""Scenario 13: one address for all models. Two services and one `openai` client; one of them sleeps, and is woken. Of
two pods of one service each conversation stays with one.
"""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from e2e.cluster.binaries import Say
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually

SCALING = {"min": 0, "max": 1, "scaleToZero": {"idleAfter": "5s", "maxWait": "3m"}}


@pytest.fixture
def client(gateway: Kube) -> openai.OpenAI:
    base = stoker.url(gateway, "stoker-gateway")
    return openai.OpenAI(base_url=f"{base}/v1", api_key="sk-e2e", timeout=200, max_retries=0)


def listed(client: openai.OpenAI) -> list[str]:
    return [model.id for model in client.models.list().data]


def said(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=4, temperature=0)
    return str(answer.model)


def streamed(client: openai.OpenAI, model: str) -> int:
    """How many pieces a streamed answer came in."""
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count to five."}], max_tokens=12, stream=True
    )
    with stream:
        return sum(1 for _ in stream)


def asked_of(place: Kube, name: str) -> dict[str, set[str]]:
    """The ids of the requests that each pod began, by its log."""
    pods = [pod["metadata"]["name"] for pod in stoker.engine_pods(place, name)]
    logs = {pod: place.kubectl("logs", pod, "-c", "engine", "--tail=-1") for pod in pods}
    return {pod: set(re.findall(r"received:.*request_id=\S*?(talk-\w+-\d+)", log)) for pod, log in logs.items()}


def talk(client: openai.OpenAI, topic: str, turns: int) -> None:
    """A conversation of so many turns."""
    messages: list[Any] = [{"role": "user", "content": f"Tell me about {topic}."}]
    for turn in range(turns):
        answer = client.chat.completions.create(
            model="crane", messages=messages, max_tokens=3, extra_headers={"x-request-id": f"talk-{topic}-{turn}"}
        )
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": f"And what else, for the {turn + 2}. time?"},
        ]


def test_a_conversation_stays_with_one_of_two_pods(place: Kube, client: openai.OpenAI) -> None:
    place.apply(stoker.service("crane", replicas=2, runtime={"args": ["--enable-log-requests"]}))
    stoker.wait_ready(place, "crane")
    eventually("it is listed", lambda: listed(client) == ["crane"], 60)
    topics = iter(f"probe{number}" for number in range(1000))

    def both_answer() -> bool:
        talk(client, next(topics), 1)
        return all(asked_of(place, "crane").values())

    eventually("both pods get requests", both_answer, 60)
    subjects = ("herons", "steam", "glass", "rivers", "chess", "salt")
    for subject in subjects:
        talk(client, subject, 3)
    told = asked_of(place, "crane")
    assert len(told) == 2
    for subject in subjects:
        turns = {f"talk-{subject}-{turn}" for turn in range(3)}
        assert sorted(len(turns & ids) for ids in told.values()) == [0, 3], f"{subject}: {told}"


def test_one_address_answers_for_all_models_and_wakes_who_sleeps(place: Kube, client: openai.OpenAI, say: Say) -> None:
    place.apply(
        stoker.service("egret", model={"servedNames": ["egret", "bird"]}),
        stoker.service("owl", autoscaling=SCALING | {"engine": "External"}),
    )
    eventually("both are listed", lambda: listed(client) == ["bird", "egret", "owl"], 60)
    stoker.wait_ready(place, "egret")
    assert [said(client, name) for name in ("egret", "bird")] == ["egret", "bird"]
    assert streamed(client, "bird") > 2
    with pytest.raises(openai.NotFoundError, match="'heron' is not served here"):
        said(client, "heron")
    with pytest.raises(openai.AuthenticationError):
        listed(client.with_options(api_key="sk-other"))

    def asleep() -> bool:
        return stoker.conditions(place, "owl")["Ready"]["reason"] == "Asleep" and not stoker.engine_pods(place, "owl")

    eventually("owl sleeps", asleep, 240)
    assert "owl" in listed(client)
    watch = stoker.Stopwatch()
    assert said(client, "owl") == "owl"
    say(f"routers: a request through the gateway woke its service and was answered after {watch.seconds:.1f} s")
    place.kubectl("delete", "infsvc", "egret", "--timeout=120s")
    eventually("what is gone is not listed", lambda: listed(client) == ["owl"], 60)
    with pytest.raises(openai.NotFoundError):
        said(client, "egret")
