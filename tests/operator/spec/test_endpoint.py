"""spec/endpoint.py: what only a parser can tell beside endpoint.inferencePool.kvEvents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.spec.endpoint import TAKEN_PORTS, KvEvents
from stoker_operator.spec.service import SpecError, parse
from stoker_runtime.settings.parse import parse as parse_serve
from stoker_runtime.settings.values import RUNNERS

Raw = Callable[..., dict[str, Any]]
FIELD = "endpoint.inferencePool.kvEvents"
ENDPOINT = {"inferencePool": {"endpointPickerRef": {"name": "epp"}, "kvEvents": {}}}


def problems(body: dict[str, Any]) -> list[str]:
    try:
        parse(body)
    except SpecError as error:
        return error.problems
    return []


def test_what_nothing_is_said_of(raw: Raw) -> None:
    assert parse(raw("demo", endpoint=ENDPOINT)).endpoint.kv_events == KvEvents(5557, {})
    for endpoint in ({}, {"inferencePool": {"endpointPickerRef": {"name": "e"}}}):
        assert parse(raw("demo", endpoint=endpoint)).endpoint.kv_events is None


def test_ports_are_those_that_pods_have(raw: Raw) -> None:
    from stoker_operator.manifests.groups.nodes import NODES_PORT
    from stoker_operator.manifests.workload import PORT

    assert set(TAKEN_PORTS) == {PORT, NODES_PORT}


@pytest.mark.parametrize("task", ["pooling", "embed", "embedding", "score", "classify", *RUNNERS])
def test_a_model_that_is_told_to_pool_has_nothing_to_tell(raw: Raw, task: str) -> None:
    pools = parse_serve(["m", "--runner", task], {}).engine.runner == "pooling"
    for runtime in (
        {"args": ["--seed", "7", "--task", task]},
        {"args": [f"--runner={task}"]},
        {"env": [{"name": "STOKER_RUNNER", "value": task}]},
    ):
        found = problems(raw("demo", endpoint=ENDPOINT, runtime=runtime))
        assert len(found) == pools
        assert all("spec.runtime.args: a model that pools" in text and FIELD in text for text in found)
        assert problems(raw("demo", runtime=runtime)) == []


@pytest.mark.parametrize(
    ("args", "refused"),
    [
        (["--no-enable-prefix-caching"], True),
        (["--enable_prefix-caching=Off"], True),
        (["--no-enable-prefix-caching", "--enable-prefix-caching"], False),
        (["--enable-prefix-caching=true"], False),
    ],
)
def test_there_must_be_a_prefix_cache(raw: Raw, args: list[str], refused: bool) -> None:
    assert parse_serve(["m", *args], {}).engine.enable_prefix_caching != refused
    found = problems(raw("demo", endpoint=ENDPOINT, runtime={"args": args}))
    assert ["--no-enable-prefix-caching" in text and FIELD in text for text in found] == [True] * refused


def test_a_canary_is_held_to_the_same(raw: Raw) -> None:
    canary = {"weight": 7, "runtime": {"args": ["--kv-events-config={}"]}}
    assert problems(raw("demo", endpoint=ENDPOINT, canary=canary)) == [
        f"spec.canary.runtime.args: --kv-events-config is what {FIELD} sets; leave one of them out"
    ]
