"""handlers.py: which services an event concerns, and that kopf stores nothing on objects."""

from __future__ import annotations

from typing import Any

import kopf
import pytest

from stoker_operator.handlers import owners, registry, settings

REFERENCE = {"kind": "InferenceService", "name": "owner"}


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"ownerReferences": [REFERENCE]}, {"owner"}),
        ({"labels": {"app.kubernetes.io/instance": "demo"}}, {"demo"}),
        ({"ownerReferences": [{"kind": "ReplicaSet", "name": "rs"}], "labels": {}}, set()),
        ({"ownerReferences": [REFERENCE, REFERENCE | {"name": "other"}]}, {"owner", "other"}),
        ({"annotations": {"user.stoker.dev/demo": "uid-1 60", "a/b": "c"}}, {"demo"}),
        ({}, set()),
    ],
)
def test_owners(meta: dict[str, Any], expected: set[str]) -> None:
    assert owners("ns", meta) == {("ns", name) for name in expected}


async def ignore(key: tuple[str, str]) -> None:
    raise AssertionError(key)


def test_there_are_event_handlers_only() -> None:
    """Any other kind of handler makes kopf write annotations or finalizers to objects."""
    handlers = registry(ignore)
    assert len(handlers._watching.get_all_handlers()) == 1
    assert not handlers._changing.get_all_handlers()
    assert not handlers._spawning.get_all_handlers()
    assert not handlers._indexing.get_all_handlers()


def test_watches_end() -> None:
    chosen = settings()
    assert chosen.watching.server_timeout
    assert chosen.watching.client_timeout
    assert chosen.watching.connect_timeout
    assert chosen.peering.standalone


async def test_what_we_wrote_ourselves_is_no_news() -> None:
    told: list[tuple[str, str]] = []

    async def enqueue(key: tuple[str, str]) -> None:
        told.append(key)

    known = {"metadata": {"resourceVersion": "7"}}
    (handler,) = registry(enqueue, lambda item: item != known)._watching.get_all_handlers()

    async def happen(kind: str | None, item: dict[str, Any]) -> list[tuple[str, str]]:
        told.clear()
        await handler.fn(namespace="ns", name="demo", event={"type": kind, "object": item})  # type: ignore[call-arg]
        return list(told)

    assert await happen("MODIFIED", {"metadata": {"resourceVersion": "8"}}) == [("ns", "demo")]
    assert await happen(None, {"metadata": {"resourceVersion": "8"}}) == [("ns", "demo")]
    assert await happen("MODIFIED", known) == []
    assert await happen("DELETED", known) == [("ns", "demo")]


def test_kopf_compares_nothing_and_stores_nothing() -> None:
    storage, patch = settings().persistence.diffbase_storage, kopf.Patch()
    body = kopf.Body({"metadata": {"name": "demo", "annotations": {"a": "b"}}, "spec": {"replicas": 3}})
    assert storage.build(body=body) == storage.fetch(body=body) == {}
    storage.store(body=body, patch=patch, essence=storage.build(body=body))
    assert not patch
