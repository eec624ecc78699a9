"""lately.py: what is remembered is what reading anew gives, for any service."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

from stoker_operator.spec.lately import Lately
from stoker_operator.spec.service import parse

Object = dict[str, Any]


def service(source: random.Random) -> Object:
    meta = {"name": "demo", "namespace": "ns", "uid": f"{source.random()}", "generation": 1, "resourceVersion": "5"}
    spec = {"model": {"uri": "hf://org/model"}, "resources": {"gpus": 1}, "replicas": source.randrange(1, 9)}
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": meta, "spec": spec}


def reader(most: int = 100) -> tuple[Lately[object], list[Object]]:
    asked: list[Object] = []

    def read(raw: Mapping[str, Any], tolerate: bool) -> object:
        asked.append(copy.deepcopy(dict(raw)) | {"tolerate": tolerate})
        return object()

    return Lately(read, most), asked


def test_a_write_to_the_status_is_no_reason_to_read_the_spec_again() -> None:
    lately, asked = reader()
    raw = service(random.Random(3))
    first = lately.read(raw, False)
    raw["metadata"] |= {"resourceVersion": "6", "managedFields": [{"manager": "somebody"}]}
    assert lately.read(raw | {"status": {"replicas": 4}}, False) is first
    assert len(asked) == 1


def test_all_that_is_read_is_read_again_when_it_changes() -> None:
    changes: list[Object] = [
        {"metadata": {"uid": "another"}},
        {"metadata": {"generation": 2}},
        {"metadata": {"annotations": {"stoker.dev/wish": "asleep"}}},
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"spec": {"replicas": 10}},
        {"kind": "Another"},
    ]
    lately, asked = reader()
    raw = service(random.Random(4))
    lately.read(raw, False)
    lately.read(raw, True)
    for change in changes:
        changed = copy.deepcopy(raw)
        for key, value in change.items():
            changed[key] = changed[key] | value if isinstance(value, dict) else value
        lately.read(changed, False)
    assert len(asked) == 2 + len(changes)


def test_it_forgets_the_oldest_and_reads_what_is_no_json() -> None:
    lately, asked = reader(most=3)
    some = [service(random.Random(seed)) for seed in range(4)]
    for raw in some:
        lately.read(raw, False)
    lately.read(some[3], False)
    assert len(asked) == 4
    lately.read(some[0], False)
    assert len(asked) == 5
    odd = some[1] | {"spec": {"x": {1, 2}}}
    lately.read(odd, False)
    lately.read(odd, False)
    assert len(asked) == 7


def test_a_service_has_the_status_of_its_own_look() -> None:
    raw = service(random.Random(7))
    before = parse(raw | {"status": {"replicas": 3}})
    after = parse(raw | {"status": {"replicas": 7}})
    assert (before.status, after.status) == ({"replicas": 3}, {"replicas": 7})
    assert parse(raw).status == {}
