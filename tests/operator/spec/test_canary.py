"""canary.py: what a canary is made of, and by what it is told from another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.manifests import canary_key
from stoker_operator.spec.service import InferenceService

Build = Callable[..., InferenceService]
MODEL = {"uri": "hf://org/model", "revision": "v3", "servedNames": ["big"], "quantization": "FP8"}
RUNTIME = {"contextLength": 777, "args": ["--seed", "3"]}


def test_what_is_given_takes_the_place_of_what_is_there(service: Build) -> None:
    other = service(model=MODEL, canary={"weight": 5, "model": {"revision": "v4"}}, runtime=RUNTIME).as_canary
    assert (other.model.revision, other.model.quantization, other.served_names) == ("v4", "FP8", ("big",))
    assert other.runtime.context_length == 777
    assert other.written["model"] == MODEL | {"revision": "v4"}
    other = service(model=MODEL, canary={"weight": 5, "runtime": {"args": ["--seed", "4"]}}, runtime=RUNTIME).as_canary
    assert (other.runtime.args, other.runtime.context_length) == (("--seed", "4"), 777)
    assert other.model.revision == "v3"


def test_another_source_takes_nothing_but_the_names(service: Build) -> None:
    other = service(model=MODEL, canary={"steps": [9], "model": {"uri": "s3://bucket/other"}}).as_canary
    assert (other.model.revision, other.model.quantization) == ("main", "Auto")
    assert other.served_names == ("big",)


def test_the_same_is_told_from_a_canary(service: Build) -> None:
    for given, same in (({"revision": "v3"}, True), ({"revision": "v4"}, False), ({"uri": "hf://org/model"}, False)):
        found = service(model=MODEL, canary={"weight": 5, "model": given}).canary
        assert found is not None
        assert found.same is same, given


SAME: dict[str, tuple[dict[str, Any], bool]] = {
    "its share": ({"canary": {"steps": [1, 2], "model": {"revision": "v4"}}}, True),
    "a setting beside it": ({"runtime": {"contextLength": 9}}, True),
    "another name for clients": ({"model": MODEL | {"servedNames": ["x"]}}, True),
    "what it is compared with": ({"model": MODEL | {"revision": "v5"}}, False),
    "the source": ({"model": MODEL | {"uri": "hf://org/other"}}, False),
    "itself": ({"canary": {"weight": 5, "model": {"revision": "v6"}}}, False),
}


@pytest.mark.parametrize("case", SAME.values(), ids=SAME)
def test_it_is_another_where_it_or_what_it_replaces_changes(service: Build, case: tuple[dict[str, Any], bool]) -> None:
    change, same = case
    spec = {"model": MODEL, "canary": {"weight": 5, "model": {"revision": "v4"}}}
    assert (canary_key(service(**spec)) == canary_key(service(**spec | change))) is same
