"""service.py: defaults, every rule, and what a prefetch reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.manifests import claim_name
from stoker_operator.spec.service import (
    FetchedModel,
    FetchFailure,
    SpecError,
    parse,
    parse_fetch_result,
    remembered_model,
)

EXAMPLES = Path(__file__).resolve().parents[3] / "crds" / "examples"
Raw = Callable[..., dict[str, Any]]

BAD = yaml.safe_load((Path(__file__).parents[1] / "bad_specs.yaml").read_text())


@pytest.mark.parametrize("case", BAD, ids=lambda case: case["parser"])
def test_a_bad_field_is_named(raw: Raw, case: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        parse(raw("demo", **case["change"]))
    assert any(case["parser"] in found for found in caught.value.problems), caught.value.problems


def test_every_problem_is_found_at_once(raw: Raw) -> None:
    body = raw("Demo", model={"uri": "x"}, resources={"gpus": -1})
    with pytest.raises(SpecError) as caught:
        parse(body)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("name", ["Demo", "1demo", "demo-", "a" * 41, ""])
def test_a_name_that_no_child_could_bear_is_refused(raw: Raw, name: str) -> None:
    with pytest.raises(SpecError, match=r"metadata\.name"):
        parse(raw(name))


@pytest.mark.parametrize("name", ["default", "kubernetes", "a-metrics", "a-metrics-metrics"])
def test_a_name_that_another_object_may_have_is_refused(raw: Raw, name: str) -> None:
    with pytest.raises(SpecError, match=r"metadata\.name: .* is not allowed"):
        parse(raw(name))
    assert parse(raw(f"{name}x")).name == f"{name}x"


def test_another_kind_is_refused(raw: Raw) -> None:
    with pytest.raises(SpecError, match="Deployment"):
        parse(raw() | {"kind": "Deployment"})


def test_defaults(raw: Raw) -> None:
    service = parse(raw("demo"))
    assert service.served_names == ("demo",)
    assert service.model.revision == "main"
    assert service.replicas is None
    assert not service.suspend
    assert (service.drain.pre_stop, service.drain.timeout) == (15, 120)
    assert service.cache.access_mode == "ReadWriteOnce"
    assert service.resources.gpu_resource == "nvidia.com/gpu"


def test_a_bare_number_is_a_quantity(raw: Raw) -> None:
    assert parse(raw("demo", resources={"gpus": 0, "cpu": 4})).resources.cpu == "4"


def test_durations_are_seconds(raw: Raw) -> None:
    assert parse(raw("demo", drain={"preStop": "1m", "timeout": "2h"})).drain.timeout == 7200


def test_a_pvc_source_names_its_claim(raw: Raw) -> None:
    assert parse(raw("demo", model={"uri": "pvc://weights/llama/7b"})).model.source_claim == ("weights", "llama/7b")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_parse(path: Path) -> None:
    assert parse(yaml.safe_load(path.read_text())).name


def test_a_fetch_result_round_trips() -> None:
    text = (
        '{"resolvedRevision": "c0ffee", "digest": "sha256:aa", "bytes": 5, "path": "sha256-aa", "serve": "sha256-aa/m",'
        ' "shape": {"layers": 2, "kvHeads": 3, "headDim": 4, "maxContext": 5}}'
    )
    assert parse_fetch_result(text) == FetchedModel("c0ffee", "sha256:aa", 5, "sha256-aa", "sha256-aa/m", 2, 3, 4, 5)


def test_a_failure_report_is_a_failure() -> None:
    text = '{"reason": "TokenRejected", "message": "401"}'
    assert parse_fetch_result(text) == FetchFailure("TokenRejected", "401")


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last)", "[]", "{}", '{"digest": 1}'])
def test_anything_else_is_no_report(text: str) -> None:
    assert parse_fetch_result(text) is None


def test_a_bundle_on_a_claim_is_unpacked_and_a_folder_is_not(raw: Raw) -> None:
    assert parse(raw("demo", model={"uri": "pvc://weights/llama"})).in_place
    bundle = parse(raw("demo", model={"uri": "pvc://weights/llama.tar"}))
    assert not bundle.in_place
    assert claim_name(bundle).startswith("models-")


def test_a_status_without_a_model_remembers_none() -> None:
    assert remembered_model({}) is None


def test_fields_of_a_newer_crd_are_named_where_they_are_tolerated(raw: Raw) -> None:
    body = raw("demo", model={"uri": "hf://a/b", "turbo": True}, cannery={"weight": 5}, warp="9")
    with pytest.raises(SpecError, match=r"spec\.warp: is not a field"):
        parse(body)
    assert parse(body, tolerate_unknown=True).unknown == ("spec.model.turbo", "spec.cannery", "spec.warp")
    assert parse(raw("demo"), tolerate_unknown=True).unknown == ()
    with pytest.raises(SpecError, match=r"spec\.replicas: is -1"):
        parse(raw("demo", warp="9", replicas=-1), tolerate_unknown=True)
