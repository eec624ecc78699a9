"""mirror.py: reads from memory, what is written is read at once, and watches that break go on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from stoker_operator.cluster import api as cluster_module
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import Kind
from stoker_operator.manifests.identity import OURS
from stoker_operator.observe import mirror as mirror_module
from stoker_operator.observe.mirror import Mirror

Object = dict[str, Any]
SELECTOR = f"{OURS},app.kubernetes.io/instance=demo"


def service(version: int, name: str = "a", uid: str = "u1", instance: str = "demo") -> Object:
    labels = {"app.kubernetes.io/instance": instance, "app.kubernetes.io/managed-by": "stoker"}
    meta = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"externalName": f"v{version}"}}


class Scripted(Cluster):
    """An API server that lists `items` and then tells `streams`, one list of (event, object) a watch."""

    def __init__(self, *items: Object) -> None:
        super().__init__(None, 1)
        self.items = list(items)
        self.streams: list[list[tuple[str, Object] | ApiError]] = []
        self.watched: list[str] = []
        self.lists = 0
        self.asked: list[tuple[str, str]] = []
        self.more, self.idle = asyncio.Event(), asyncio.Event()

    async def pages(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[tuple[list[Object], str]]:
        self.lists += 1
        self.asked.append((kind.kind, selector))
        version = str(max((int(i["metadata"]["resourceVersion"]) for i in self.items), default=1))
        yield self.items[:1], version
        yield self.items[1:], version

    async def watch(self, kind: Kind, namespace: str, selector: str, since: str) -> AsyncIterator[tuple[str, Object]]:
        self.watched.append(since)
        if not self.streams:
            self.idle.set()
            await self.more.wait()
            self.more.clear()
        for told in self.streams.pop(0):
            if isinstance(told, ApiError):
                raise told
            yield told


class Followed(Mirror):
    """A Mirror over a script."""

    def __init__(self, script: Scripted) -> None:
        self.script = script
        self.told: list[str] = []
        super().__init__(script, (), self.note, self.note)

    async def note(self, meta: Mapping[str, Any]) -> None:
        self.told.append(meta["name"])

    def pages(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[tuple[list[Object], str]]:
        return self.script.pages(kind, namespace, selector)

    def watch(self, kind: Kind, namespace: str, selector: str, since: str) -> AsyncIterator[tuple[str, Object]]:
        return self.script.watch(kind, namespace, selector, since)

    async def names(self) -> list[str]:
        return [item["metadata"]["name"] for item in await self.list_all(kinds.SERVICE, "ns", SELECTOR)]

    async def stream(self, *told: tuple[str, Object] | ApiError) -> None:
        """Let the watch tell this, and wait until it was heard."""
        async with asyncio.timeout(20):
            await self.script.idle.wait()
            self.script.idle.clear()
            self.script.streams.append(list(told))
            self.script.more.set()
            await self.script.idle.wait()


@pytest.fixture
async def followed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(mirror_module, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(mirror_module, "LONGEST_BACKOFF_SECONDS", 0.002)
    made = Followed(Scripted(service(5)))
    yield made
    await made.stop()


async def test_a_kind_is_listed_once_and_followed(followed: Followed) -> None:
    assert await followed.names() == ["a"]
    await followed.stream(("ADDED", service(6, "b", "u2")), ("ADDED", service(7, "c", "u3", "other")))
    assert await followed.names() == ["a", "b"]
    await followed.stream(("DELETED", service(8)), ("MODIFIED", service(9, "b", "u2")))
    assert await followed.names() == ["b"]
    assert followed.script.lists == 1
    assert followed.told == ["a", "b", "c", "a", "b"]
    everything = await followed.list_all(kinds.SERVICE, "ns", OURS)
    assert [item["metadata"]["resourceVersion"] for item in everything] == ["9", "7"]


async def test_nothing_gets_older_and_nothing_comes_back(followed: Followed) -> None:
    await followed.names()
    await followed.stream(("MODIFIED", service(9)), ("MODIFIED", service(6)))
    [item] = await followed.list_all(kinds.SERVICE, "ns", SELECTOR)
    assert item["metadata"]["resourceVersion"] == "9"
    await followed.stream(("DELETED", service(10)), ("MODIFIED", service(9)))
    assert await followed.names() == []
    await followed.stream(("ADDED", service(11, uid="u9")), ("DELETED", service(12)))
    assert await followed.names() == ["a"]  # the same name, another object


async def test_an_object_that_lost_its_label_comes_back_with_it(followed: Followed) -> None:
    assert await followed.names() == ["a"]
    await followed.stream(("DELETED", service(20)))
    assert await followed.names() == []
    shelf = followed._shelves["Service"]
    assert (shelf.entries, shelf.named, shelf.inside) == ({}, {}, {}), "something is kept of what is gone"
    await followed.stream(("ADDED", service(21)))
    assert await followed.names() == ["a"]


async def test_what_was_given_its_label_back_stays_when_its_loss_is_told_late(followed: Followed) -> None:
    assert await followed.names() == ["a"]
    followed.take_over(kinds.SERVICE, service(9))  # the answer to the write that gave it back
    await followed.stream(("DELETED", service(8)))
    assert await followed.names() == ["a"]
    await followed.stream(("ADDED", service(9)), ("DELETED", service(12)))
    assert await followed.names() == []


async def test_a_reader_cannot_change_what_the_next_one_reads(followed: Followed) -> None:
    [item] = await followed.list_all(kinds.SERVICE, "ns", SELECTOR)
    item["metadata"]["labels"].clear()
    [item] = await followed.list_all(kinds.SERVICE, "ns", SELECTOR)
    assert item["metadata"]["labels"]


async def test_services_are_read_from_memory_whatever_their_labels(followed: Followed) -> None:
    head: Object = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "spec": {"suspend": True}}
    mine = head | {"metadata": {"name": "a", "namespace": "ns", "uid": "u1", "resourceVersion": "7"}}
    followed.script.items = [mine]
    assert await followed.get(kinds.INFERENCE_SERVICE, "ns", "a") == mine
    assert await followed.get(kinds.INFERENCE_SERVICE, "ns", "b") is None
    anew = mine | {"metadata": mine["metadata"] | {"uid": "u2", "resourceVersion": "9"}}
    await followed.stream(
        ("DELETED", mine | {"metadata": mine["metadata"] | {"resourceVersion": "8"}}), ("ADDED", anew)
    )
    found = await followed.get(kinds.INFERENCE_SERVICE, "ns", "a")
    assert (found or {})["metadata"]["uid"] == "u2"
    assert followed.script.asked == [("InferenceService", "")]
    assert followed.told == ["a", "a", "a"]


async def test_who_wrote_a_field_is_kept_where_a_plan_asks_and_nowhere_else(followed: Followed) -> None:
    written = [{"manager": "somebody", "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
    stored = service(5) | {"kind": "Deployment"}
    stored["metadata"]["managedFields"] = written
    followed.script.items = [stored]
    for kind, kept in ((kinds.DEPLOYMENT, written), (kinds.REPLICA_SET, None)):
        stored["kind"] = kind.kind
        [item] = await followed.list_all(kind, "ns", SELECTOR)
        assert item["metadata"].get("managedFields") == kept
    assert stored["metadata"]["managedFields"] == written, "who told of it still has it"


async def test_what_objects_have_in_common_is_kept_once(followed: Followed) -> None:
    await followed.names()
    rng = random.Random()
    like = {"spec": {f"field-{n}": rng.randbytes(20).hex() for n in range(90)}}
    items = [service(100 + n, f"pod-{n}", f"uid-{n}") | like for n in range(300)]
    items = [item | {"status": {"ip": rng.randbytes(8).hex(), "grüße": None}} for item in items]
    followed.script.items = items
    assert await followed.list_all(kinds.POD, "ns", SELECTOR) == sorted(
        items, key=lambda item: item["metadata"]["name"]
    )
    held = sum(len(entry.packed) for entry in followed._shelves["Pod"].entries.values())
    assert held < sum(map(len, map(json.dumps, items))) / 10


async def test_who_goes_through_thousands_lets_others_have_their_turns(followed: Followed) -> None:
    count = random.randint(1000, 2000)
    followed.script.items = [service(5 + n, f"s{n}", f"u{n}") for n in range(count)]
    await followed.names()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            if turns == 3:
                followed.take_over(kinds.SERVICE, service(10 * count, f"s{count - 1}", f"u{count - 1}"))
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    seen = [item["metadata"] async for item in followed.each(kinds.SERVICE)]
    beside.cancel()
    assert {meta["name"] for meta in seen} == {f"s{n}" for n in range(count)}
    assert turns > count / 100, f"{turns} turns of others beside {count} objects"
    assert seen[-1]["resourceVersion"] == str(10 * count), "what happened meanwhile is seen"


async def test_a_broken_watch_goes_on_where_it_was(followed: Followed) -> None:
    await followed.names()
    await followed.stream(("BOOKMARK", {"metadata": {"resourceVersion": "20"}}), ApiError(0, "", "the stream broke"))
    await followed.stream(("ADDED", service(21, "b", "u2")))
    assert followed.script.watched == ["5", "20", "21"]
    assert await followed.names() == ["a", "b"]
    assert followed.script.lists == 1


async def test_a_place_that_was_forgotten_is_listed_again(followed: Followed) -> None:
    await followed.names()
    followed.script.items = [service(30, "b", "u2")]
    await followed.stream(ApiError(410, "Expired", "too old resource version"))
    assert await followed.names() == ["b"]
    assert (followed.script.lists, followed.script.watched) == (2, ["5", "30"])
    assert sorted(followed.told) == ["a", "a", "b"]  # the one that went away meanwhile is told of too


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_api_server_with_too_much_to_do_is_not_asked_for_lists(followed: Followed, status: int) -> None:
    await followed.names()
    await followed.stream(ApiError(status, "", "as injected"))
    await followed.stream(("ADDED", service(21, "b", "u2")))
    assert (followed.script.lists, followed.script.watched) == (1, ["5", "5", "21"])
    assert await followed.names() == ["a", "b"]


async def test_an_api_server_that_was_set_back_is_believed(followed: Followed) -> None:
    await followed.names()
    await followed.stream(("ADDED", service(90, "b", "u2")), ("DELETED", service(91)))
    followed.script.items = [service(5)]  # a backup from before both
    await followed.stream(ApiError(504, "Timeout", "Too large resource version"))
    assert await followed.names() == ["a"]
    assert followed.script.watched == ["5", "91", "5"]


async def test_a_watch_that_ended_for_good_is_begun_anew(followed: Followed) -> None:
    await followed.names()
    [shelf] = followed._shelves.values()
    shelf.watches[0].cancel()
    await asyncio.gather(*shelf.watches, return_exceptions=True)
    followed.script.items.append(service(40, "b", "u2"))
    assert await followed.names() == ["a", "b"]


@pytest.mark.apiserver
async def test_on_a_real_api_server(
    cluster: Cluster, namespace: str, eventually: Callable[..., Any], kubectl: Callable[..., str]
) -> None:
    told: list[str] = []

    async def note(meta: Mapping[str, Any]) -> None:
        told.append(meta["name"])

    mirror = Mirror(cluster, (namespace,), note)

    async def read() -> dict[str, Object]:
        items = await mirror.list_all(kinds.CONFIG_MAP, namespace, SELECTOR)
        return {item["metadata"]["name"]: item for item in items}

    def body(name: str, value: str) -> Object:
        labels = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/managed-by": "stoker"}
        meta = {"name": name, "namespace": namespace, "labels": labels}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"key": value}}

    try:
        assert await read() == {}
        await mirror.apply(kinds.CONFIG_MAP, body("mine", "1"))
        assert (await read())["mine"]["data"] == {"key": "1"}  # at once, whatever the watch does
        kubectl("patch", "configmap", "mine", "--type=merge", "-p", '{"data": {"key": "2"}}')

        async def patched() -> bool:
            return bool((await read())["mine"]["data"] == {"key": "2"})

        await eventually(patched)
        assert "mine" in told
        uid = (await read())["mine"]["metadata"]["uid"]
        await mirror.delete(kinds.CONFIG_MAP, namespace, "mine", uid)
        assert all("deletionTimestamp" in item["metadata"] for item in (await read()).values())

        async def gone() -> bool:
            return await read() == {}

        await eventually(gone)
        await mirror.apply(kinds.CONFIG_MAP, body("mine", "3"))
        assert (await read())["mine"]["data"] == {"key": "3"}
    finally:
        await mirror.stop()
    with pytest.raises(ApiError, match=r"the server could not find|404"):
        async for _ in cluster.watch(Kind("v1", "Nothing", "nothings"), namespace, "", "1"):
            pass


@pytest.mark.apiserver
async def test_a_long_list_comes_in_pages(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "PAGE_ITEMS", 2)
    for number in range(5):
        meta = {"name": f"n{number}", "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": "stoker"}}
        await cluster.apply(kinds.CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})
    pages = [page async for page in cluster.pages(kinds.CONFIG_MAP, namespace, OURS)]
    assert [len(items) for items, _ in pages] == [2, 2, 1]
    assert len({version for _, version in pages}) == 1
    names = [item["metadata"]["name"] for item in await cluster.list_all(kinds.CONFIG_MAP, namespace, OURS)]
    assert names == ["n0", "n1", "n2", "n3", "n4"]


async def test_what_a_write_did_is_no_news_though_a_watch_tells_first(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of a write that is under way, others' writes among them, in random histories."""
    rng = random.Random()
    asked, answer = asyncio.Event(), asyncio.Queue[Object | ApiError]()

    async def apply(*_: Any) -> Object:
        asked.set()
        found = await answer.get()
        if isinstance(found, ApiError):
            raise found
        return found

    monkeypatch.setattr(Cluster, "apply", apply)
    await followed.names()
    version = 5
    for _ in range(60):
        followed.told.clear()
        asked.clear()
        before, fails = rng.randrange(2), rng.random() < 0.3
        theirs = [version + number for number in range(1, 1 + before)]
        ours = version + before + 1
        after = [ours + number for number in range(1, 1 + rng.randrange(3))]
        version = ours + len(after)
        written = asyncio.create_task(followed.apply(kinds.SERVICE, service(ours)))
        await asked.wait()
        early = rng.randrange(1 + len(after))  # so many of the later ones are told before the answer, too
        events = [*theirs, *([] if fails else [ours]), *after[:early]]
        for number in events:
            item = service(number)
            if rng.random() < 0.5:
                assert not followed.learn(kinds.SERVICE, item), "it is told when the answer is there"
        await followed.stream(*(("MODIFIED", service(number)) for number in events))
        assert followed.told == [], "told while it is not known whose change it is"
        answer.put_nowait(ApiError(409, "Conflict", "") if fails else service(ours))
        await asyncio.gather(written, return_exceptions=True)
        seen = [*(theirs if fails else ()), *after[:early]]
        # One of two watches may be ahead: the older one of two changes is nothing to tell then.
        assert bool(followed.told) == bool(seen)
        assert len(followed.told) <= len(seen)
        followed.told.clear()
        await followed.stream(*(("MODIFIED", service(number)) for number in after[early:]))
        assert followed.told == ["a"] * len(after[early:])
        [item] = await followed.list_all(kinds.SERVICE, "ns", SELECTOR)
        newest = max([*theirs, *after] + ([] if fails else [ours]), default=0)
        assert not newest or item["metadata"]["resourceVersion"] == str(newest)
    [shelf] = followed._shelves.values()
    assert (shelf.writing, shelf.held) == ({}, {}), "something is kept of what was written"
