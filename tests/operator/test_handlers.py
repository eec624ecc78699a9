"""handlers.py: which services an event concerns, and that kopf stores nothing on objects."""

from __future__ import annotations

from typing import Any

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
