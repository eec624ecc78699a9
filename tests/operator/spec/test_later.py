"""later.py: the CRD and the parser refuse the same fields of a later version, with the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.spec.later import LATER
from stoker_operator.spec.service import SpecError, parse

CRD = Path(__file__).parents[3] / "crds" / "stoker.dev_inferenceservices.yaml"


def refused(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """(path, message) of every field that the CRD has only to refuse it."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if rule["rule"] == "false":
            yield path, rule["message"]
    for name, child in schema.get("properties", {}).items():
        yield from refused(child, f"{path}.{name}" if path else name)


def test_the_crd_refuses_the_same_with_the_same_words() -> None:
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert dict(refused(schema, "")) == LATER


def test_it_is_refused_once_and_what_else_is_wrong_is_said_too(raw: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(SpecError) as caught:
        parse(raw("demo", podTemplate={"spec": {"hostNetwork": True}}, replicas=-1))
    assert caught.value.problems == [
        f"spec.podTemplate.spec.hostNetwork: {LATER['spec.podTemplate.spec.hostNetwork']}",
        "spec.replicas: is -1; must be between 0 and 1000",
    ]
