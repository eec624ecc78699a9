"""models.py: who answers for a name, as Services and EndpointSlices tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.gateway.models import make_table, read_backends
from stoker_operator.manifests.activation import ASLEEP, Bounds, Sleep, activator_slice
from stoker_operator.spec.service import InferenceService

Build = Callable[..., InferenceService]
Object = dict[str, Any]
BORN = "2026-03-0{}T04:05:06Z"


def made(service: InferenceService, day: int = 1) -> Object:
    """The service's own Service, as it is stored."""
    found = manifests.web_service(service)
    return found | {"metadata": found["metadata"] | {"creationTimestamp": BORN.format(day)}}


def pods(name: str, *endpoints: tuple[str, bool], **port: Any) -> Object:
    labels = {"kubernetes.io/service-name": name}
    found = [{"addresses": [address], "conditions": {"ready": ready}} for address, ready in endpoints]
    meta = {"labels": labels, "namespace": "default", "name": f"{name}-x"}
    return {"metadata": meta, "endpoints": found, "ports": [{"name": "http", "port": 8000} | port]}


def test_a_service_is_where_its_ready_pods_are_and_whoever_holds_its_requests(service: Build) -> None:
    asleep = service("owl")
    sleep = activator_slice(asleep, Sleep(ASLEEP, "n", "", ""), Bounds(1, 1, 1, False, ("owl",)), 20007, "10.0.0.9")
    slices = [pods("egret", ("10.1.0.2", True), ("10.1.0.3", False)), pods("other", ("10.1.0.4", True)), sleep]
    services = [made(service("egret", model={"uri": "hf://a/b", "servedNames": ["e", "f"]})), made(asleep)]
    egret, owl = read_backends(services, slices)
    assert (egret.models, egret.endpoints) == (("e", "f"), (("10.1.0.2", 8000),))
    assert (owl.models, owl.endpoints, owl.cluster) == (("owl",), (("10.0.0.9", 20007),), "default.owl")


def test_a_name_is_the_services_that_had_it_first(service: Build) -> None:
    names = {"uri": "hf://a/b", "servedNames": ["shared", "own"]}
    young, old = made(service("aaa", model=names), day=9), made(service("zzz", model=names), day=2)
    table = make_table(read_backends([young, old], []))
    assert {name: backend.name for name, backend in table.models.items()} == {"shared": "zzz", "own": "zzz"}
    assert [(name, backend.name) for name, backend in table.shadowed] == [("shared", "aaa"), ("own", "aaa")]


@pytest.mark.parametrize("change", ["suspended", "of scrapers", "going", "garbled"])
def test_what_is_no_way_to_a_model_is_none(service: Build, change: str) -> None:
    built = service("egret", suspend=change == "suspended")
    found = made(built)
    if change == "of scrapers":
        found = found | {
            "metadata": manifests.metrics_service(built)["metadata"] | {"creationTimestamp": BORN.format(1)}
        }
    if change == "going":
        found["metadata"]["deletionTimestamp"] = BORN.format(2)
    if change == "garbled":
        found["metadata"]["annotations"] = {"stoker.dev/models": json.dumps("egret")}
    assert read_backends([found], [pods("egret", ("10.1.0.2", True))]) == ()


def test_a_port_that_speaks_another_protocol_is_not_asked(service: Build) -> None:
    [backend] = read_backends([made(service("egret"))], [pods("egret", ("10.1.0.2", True), appProtocol="https")])
    assert backend.endpoints == ()
