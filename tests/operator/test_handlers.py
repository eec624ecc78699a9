"""handlers.py: which services an event concerns, and that kopf stores nothing on objects."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_operator.handlers import WATCHED, kopf_name, owners, registry, settings

REFERENCE = {"kind": "InferenceService", "name": "owner"}


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"ownerReferences": [REFERENCE]}, {"owner"}),
        ({"labels": {"app.kubernetes.io/instance": "demo"}}, {"demo"}),
        ({"ownerReferences": [{"kind": "ReplicaSet", "name": "rs"}], "labels": {}}, set()),
        ({"ownerReferences": [REFERENCE, REFERENCE | {"name": "other"}]}, {"owner", "other"}),
        ({}, set()),
    ],
)
def test_owners(meta: dict[str, Any], expected: set[str]) -> None:
    assert owners("ns", meta) == {("ns", name) for name in expected}


def test_kinds_are_named_as_kopf_wants_them() -> None:
    assert [kopf_name(kind) for kind in WATCHED[:4:3]] == [
        ("", "v1", "serviceaccounts"),
        ("apps", "v1", "deployments"),
    ]


async def ignore(key: tuple[str, str]) -> None:
    raise AssertionError(key)


def test_there_are_event_handlers_only() -> None:
    """Any other kind of handler makes kopf write annotations or finalizers to objects."""
    handlers = registry(ignore)
    assert len(handlers._watching.get_all_handlers()) == len(WATCHED) + 1
    assert not handlers._changing.get_all_handlers()
    assert not handlers._spawning.get_all_handlers()
    assert not handlers._indexing.get_all_handlers()


def test_watches_end_and_children_are_filtered_by_the_server() -> None:
    chosen = settings()
    assert chosen.watching.server_timeout
    assert chosen.watching.client_timeout
    assert chosen.watching.connect_timeout
    assert len(chosen.watching.label_selectors) == len(WATCHED)
    assert chosen.peering.standalone
