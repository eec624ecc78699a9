"""handlers.py: which events are news, and that kopf stores nothing on objects and lists them in pages."""

from __future__ import annotations

from typing import Any

import kopf

from stoker_operator.handlers import registry, settings


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


def test_services_are_listed_in_pages() -> None:
    """5,000 services parsed at once took more memory than all else."""
    assert 0 < (settings().watching.chunk_size or 0) <= 500


async def test_what_we_wrote_ourselves_is_no_news() -> None:
    told: list[tuple[str, str]] = []

    async def enqueue(key: tuple[str, str]) -> None:
        told.append(key)

    known = {"metadata": {"resourceVersion": "7"}}
    (handler,) = registry(enqueue, lambda item: item != known)._watching.get_all_handlers()

    async def happen(kind: str | None, item: dict[str, Any]) -> list[tuple[str, str]]:
        told.clear()
        event = {"type": kind, "object": item}
        assert handler.when is not None
        if handler.when(event=event):  # type: ignore[call-arg]
            await handler.fn(namespace="ns", name="demo", event=event)  # type: ignore[call-arg]
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
