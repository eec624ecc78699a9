"""envoy.py, routes.py: a real Envoy, told by the gateway's documents, and a real client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from stoker_operator.gateway.models import Backend
from stoker_operator.gateway.settings import GatewaySettings

KEYS = ("sk-left", "sk-right")
ASKED: Any = [{"role": "user", "content": 'a "model": "heron" in the text leads nowhere'}]
Engines = Callable[[int], Any]
Eventually = Callable[..., Any]


def backend(name: str, *engines: Any, models: tuple[str, ...] = (), created: int = 7) -> Backend:
    return Backend("team", name, created, models or (name,), tuple(("127.0.0.1", each.port) for each in engines))


async def listed(proxy: Any, key: str = "none") -> list[str]:
    try:
        return [each.id for each in (await proxy.client(key).models.list()).data]
    except openai.APIConnectionError:
        return []  # it does not listen yet


async def serving(proxy: Any, eventually: Eventually, *names: str, key: str = "none") -> None:
    async def told() -> bool:
        return await listed(proxy, key) == sorted(names)

    await eventually(told)


async def ask(proxy: Any, model: str, messages: Any = ASKED, key: str = "none") -> str:
    answer = await proxy.client(key).chat.completions.create(model=model, messages=messages)
    return str(answer.choices[0].message.content)


async def answers(proxy: Any, model: str) -> bool:
    try:
        return bool(await ask(proxy, model))
    except openai.InternalServerError:
        return False


async def test_requests_go_by_their_model(proxy: Any, engines: Engines, eventually: Eventually) -> None:
    one, two = await engines(2)
    proxy.tell(backend("egret", one, models=("egret", "bird-7b")), backend("heron", two))
    await serving(proxy, eventually, "bird-7b", "egret", "heron")
    assert [await ask(proxy, name) for name in ("egret", "bird-7b", "heron")] == [str(e.port) for e in (one, one, two)]
    assert one.got[1]["model"] == "bird-7b"
    assert (await proxy.client("none").models.retrieve("heron")).id == "heron"
    with pytest.raises(openai.NotFoundError, match="'ibis\"' is not served here") as unknown:
        await ask(proxy, 'ibis"')
    assert unknown.value.code == "model_not_found"
    async with anthropic.AsyncAnthropic(base_url=proxy.url.removesuffix("/v1"), api_key="x", max_retries=0) as there:
        with pytest.raises(anthropic.NotFoundError, match="'ibis' is not served here"):
            await there.messages.create(model="ibis", max_tokens=1, messages=ASKED)
    bodies: tuple[Any, ...] = ({}, ["egret"], {"model": 5}, None)
    for body in bodies:
        with pytest.raises(openai.BadRequestError, match="names none"):
            await proxy.client("none").post("/completions", body=body, cast_to=object)
    proxy.tell(backend("heron", two), backend("stork", one))
    await serving(proxy, eventually, "heron", "stork")
    await eventually(partial(answers, proxy, "stork"))  # the pods of a new model may be read after its name
    assert await ask(proxy, "stork") == str(one.port)
    with pytest.raises(openai.NotFoundError):
        await ask(proxy, "egret")


async def test_an_answer_comes_as_it_is_made_and_a_change_cuts_none(
    proxy: Any, engines: Engines, eventually: Eventually
) -> None:
    one, two = await engines(2)
    proxy.tell(backend("egret", one))
    await serving(proxy, eventually, "egret")
    one.held.clear()
    stream = await proxy.client("none").chat.completions.create(model="egret", messages=ASKED, stream=True)
    said = [(await anext(stream)).choices[0].delta.content]
    assert await proxy.admin.active() == 1
    proxy.tell(backend("heron", two), keys=KEYS)
    await serving(proxy, eventually, "heron", key=KEYS[1])
    await proxy.admin.drain()
    one.held.set()
    said += [each.choices[0].delta.content async for each in stream]
    assert said == ["first", "last"]


async def test_who_brings_no_key_learns_nothing_else(proxy: Any, engines: Engines, eventually: Eventually) -> None:
    [one] = await engines(1)
    proxy.tell(backend("egret", one), keys=KEYS)
    await serving(proxy, eventually, "egret", key=KEYS[0])
    assert await ask(proxy, "egret", key=KEYS[1]) == str(one.port)
    for work in (listed(proxy, "sk-lef"), ask(proxy, "egret", key="wrong"), ask(proxy, "ibis", key="x")):
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            await work
    async with aiohttp.ClientSession() as session:
        for path, head in (("/health", {}), ("/v1/models", {"x-api-key": KEYS[1]})):
            async with session.get(proxy.url.removesuffix("/v1") + path, headers=head) as answer:
                assert answer.status == 200
    proxy.tell(backend("egret", one), keys=KEYS[:1])

    async def taken_back() -> bool:
        try:
            await listed(proxy, KEYS[1])
        except openai.AuthenticationError:
            return True
        return False

    await eventually(taken_back)
    assert await listed(proxy, KEYS[0]) == ["egret"]
    assert len(one.got) == 1


async def limited(proxy: Any, key: str) -> openai.RateLimitError | None:
    """What it is told that asks once; None, it is answered."""
    try:
        await ask(proxy, "egret", key=key)
    except openai.RateLimitError as error:
        return error
    return None


async def test_each_key_has_its_own_minute_whatever_changes(
    proxy: Any, engines: Engines, eventually: Eventually, settings: GatewaySettings
) -> None:
    one, two = await engines(2)
    proxy.settings = replace(settings, requests_per_minute=1)
    proxy.tell(backend("egret", one), keys=KEYS)
    await serving(proxy, eventually, "egret", key=KEYS[0])
    assert await limited(proxy, KEYS[0]) is None
    refused = await limited(proxy, KEYS[0])
    assert refused is not None
    assert (refused.code, refused.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert refused.response.headers["retry-after"] == "60"
    assert await listed(proxy, KEYS[0]) == ["egret"], "looking costs nothing"
    with pytest.raises(openai.NotFoundError):
        await ask(proxy, "ibis", key=KEYS[0])
    with pytest.raises(openai.AuthenticationError):
        await ask(proxy, "egret", key="wrong")
    address = proxy.url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=address, api_key=KEYS[0], max_retries=0) as there:
        with pytest.raises(anthropic.RateLimitError, match="1 requests a minute") as other:
            await there.messages.create(model="egret", max_tokens=1, messages=ASKED)
    assert other.value.response.json()["error"]["type"] == "rate_limit_error"
    hidden = {"Authorization": "Bearer of-nobody", "x-api-key": KEYS[0]}
    url, body = f"{proxy.url}/completions", {"model": "egret"}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=hidden) as answer:
        assert answer.status == 429, "by whatever header, and beside whatever other one, it is the same key"
    assert await limited(proxy, KEYS[1]) is None, "another key has its own"
    proxy.tell(backend("egret", one), backend("heron", two), keys=(KEYS[0], "sk-new"))
    await serving(proxy, eventually, "egret", "heron", key="sk-new")
    assert await limited(proxy, KEYS[0]) is not None, "a model or a key that comes gives nobody a new minute"
    assert await limited(proxy, "sk-new") is None
    assert len(one.got) == 3


async def test_without_keys_all_have_one_minute_together(
    proxy: Any, engines: Engines, eventually: Eventually, settings: GatewaySettings
) -> None:
    [one] = await engines(1)
    proxy.settings = replace(settings, requests_per_minute=2)
    proxy.tell(backend("egret", one))
    await serving(proxy, eventually, "egret")
    assert [await limited(proxy, "any"), await limited(proxy, "other")] == [None, None]
    refused = await limited(proxy, "third")
    assert refused is not None
    assert refused.response.headers["retry-after"] == "30"
    url = f"http://127.0.0.1:{settings.metrics_port}/stats/prometheus"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        figures = await answer.text()
    assert 'envoy_http_local_rate_limit_rate_limited{envoy_local_http_ratelimit_prefix="limit"} 1' in figures


async def test_who_waits_as_long_as_is_said_is_let_in(
    proxy: Any, engines: Engines, eventually: Eventually, settings: GatewaySettings
) -> None:
    [one] = await engines(1)
    proxy.settings = replace(settings, requests_per_minute=29)
    proxy.tell(backend("egret", one), keys=KEYS)
    await serving(proxy, eventually, "egret", key=KEYS[0])
    answered = 0
    while (refused := await limited(proxy, KEYS[0])) is None:
        answered += 1
    assert answered >= 29
    await asyncio.sleep(float(refused.response.headers["retry-after"]))
    assert await limited(proxy, KEYS[0]) is None


async def test_what_begins_alike_goes_to_one_pod_until_it_has_its_share(
    proxy: Any, engines: Engines, eventually: Eventually
) -> None:
    pods = await engines(3)
    proxy.tell(backend("egret", *pods))
    await serving(proxy, eventually, "egret")
    first = []
    for topic in range(12):
        turns: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"topic {topic}" * 9}]
        said = [await ask(proxy, "egret", turns)]
        for turn in range(2):
            turns += [{"role": "assistant", "content": f"an answer {turn}"}, {"role": "user", "content": "and more"}]
            said.append(await ask(proxy, "egret", turns))
        assert len(set(said)) == 1, "a conversation changed its pod"
        first.append(said[0])
    assert len(set(first)) > 1, "all conversations went to one pod"
    for each in pods:
        each.held.clear()
    asked = []
    for number in range(1, 25):
        asked.append(asyncio.create_task(ask(proxy, "egret")))
        await eventually(lambda number=number: sum(len(each.got) for each in pods) == 36 + number)
    for each in pods:
        each.held.set()
    load = Counter(await asyncio.gather(*asked))
    assert max(load.values()) <= 12, "one pod got everything, though others had nothing to do"


async def test_what_the_gateway_itself_refuses(proxy: Any, engines: Engines, eventually: Eventually) -> None:
    [one] = await engines(1)
    proxy.tell(backend("egret", one), backend("nobody"))
    await serving(proxy, eventually, "egret", "nobody")
    with pytest.raises(openai.APIStatusError, match="larger than 2 MiB") as large:
        await ask(proxy, "egret", [{"role": "user", "content": "x" * (3 << 20)}])
    assert large.value.status_code == 413
    with pytest.raises(openai.InternalServerError, match="No pod of the model") as none:
        await ask(proxy, "nobody")
    assert (none.value.status_code, none.value.response.headers["retry-after"]) == (503, "5")
    assert await ask(proxy, "egret", [{"role": "user", "content": "x" * (1 << 20)}]) == str(one.port)
