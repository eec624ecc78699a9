"""plugin/rollback.py: which revision is gone back to, and by what patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.manifests.revision import Record
from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.rollback import listed, operations, target

Object = dict[str, Any]
TEMPLATE = {"spec": {"containers": [{"image": "registry.example/some:3"}]}}
OLD = {"model": {"uri": "hf://a/old"}, "resources": {"gpus": 1}, "runtime": {"contextLength": 77}}


def record(name: str, number: int, **more: Any) -> Record:
    return Record(name, f"key-{name}", number, TEMPLATE, **({"served": True, "spec": OLD} | more))


@pytest.fixture
def service(raw: Callable[..., Object]) -> Object:
    found = raw("some", model={"uri": "hf://a/new"}, resources={"gpus": 1}, drain={"timeout": "9s"}, replicas=4)
    found["metadata"]["resourceVersion"] = "4711"
    found["status"] = {"revisions": {"current": "bbb"}}
    return found


def test_the_patch_makes_the_spec_say_what_shaped_the_pods_and_nothing_else(service: Object) -> None:
    assert operations(service, record("aaa", 1)) == [
        {"op": "test", "path": "/metadata/resourceVersion", "value": "4711"},
        {"op": "add", "path": "/spec/model", "value": OLD["model"]},
        {"op": "add", "path": "/spec/runtime", "value": OLD["runtime"]},
        {"op": "remove", "path": "/spec/drain"},
    ]


def test_the_last_other_one_that_served_is_the_default(service: Object) -> None:
    now = {part: service["spec"][part] for part in ("model", "resources", "drain")}
    records = [
        record("aaa", 1),
        record("ccc", 2, served=False),
        record("ddd", 3, failed="it crashed"),
        record("bbb", 4, spec=now),
    ]
    assert target(service, records, "").hash == "aaa"
    assert target(service, records, "bb").hash == "bbb"
    assert operations(service, records[-1]) == []


@pytest.mark.parametrize(
    ("records", "wanted", "says"),
    [
        ([record("bbb", 1, spec={})], "", "there is no other revision that served"),
        ([record("aaa", 1)], "x", "no revision begins with 'x'"),
        ([record("aa1", 1), record("aa2", 2)], "aa", "2 revisions begin with 'aa'"),
        ([record("aaa", 1, failed="it crashed")], "aaa", "aaa was given up: it crashed"),
        ([record("aaa", 1, spec={})], "aaa", "an older operator rolled it out"),
    ],
)
def test_what_cannot_be_gone_back_to_is_refused(service: Object, records: list[Record], wanted: str, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        target(service, records, wanted)


def test_the_list_says_which_runs(service: Object) -> None:
    lines = list(listed(service, [record("aaa", 1), record("bbb", 2, served=False)]))
    assert lines[1].split() == ["1", "aaa", "served", "hf://a/old", "at", "main", "registry.example/some:3"]
    assert "bbb    never ready (runs)" in lines[2]
