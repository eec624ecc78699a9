"""directory.py: what the EndpointSlices of a service say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker_operator.activator.directory import read_sleeper
from stoker_operator.manifests.activation import ASLEEP, Bounds, Sleep, activator_slice
from stoker_operator.spec.service import InferenceService

BOUNDS = Bounds(5, 90, 12, True, ("demo", "other"))
SLEEP = Sleep(ASLEEP, "nap-3", "2026-01-01T00:00:00Z", "nobody asked")


def pods(service: str, *endpoints: tuple[str, bool], port: int = 8000) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": service, "app.kubernetes.io/component": "engine"}
    found = [{"addresses": [address], "conditions": {"ready": ready}} for address, ready in endpoints]
    return {"metadata": {"labels": labels}, "endpoints": found, "ports": [{"name": "http", "port": port}]}


def test_a_service_has_the_pods_that_are_ready_behind_its_own_name(service: Callable[..., InferenceService]) -> None:
    mine = activator_slice(service("demo"), SLEEP, BOUNDS, 20001, "10.0.0.9")
    slices = [pods("demo", ("10.1.0.2", True), ("10.1.0.3", False)), mine, pods("demo-metrics", ("10.1.0.3", True))]
    found = read_sleeper(("default", "demo"), slices)
    assert found is not None
    assert (found.port, found.bounds, found.sleep) == (20001, BOUNDS, SLEEP)
    assert found.pods == (("10.1.0.2", 8000),)


def test_without_a_slice_of_ours_it_is_nobody(service: Callable[..., InferenceService]) -> None:
    assert read_sleeper(("default", "demo"), [pods("demo", ("10.1.0.2", True))]) is None
    going = activator_slice(service("demo"), SLEEP, BOUNDS, 20001, "10.0.0.9")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert read_sleeper(("default", "demo"), [going]) is None
    garbled = activator_slice(service("demo"), SLEEP, BOUNDS, 20001, "10.0.0.9")
    garbled["metadata"]["annotations"]["stoker.dev/activation"] = "{"
    assert read_sleeper(("default", "demo"), [garbled]) is None


def test_an_address_of_the_sixth_version_makes_a_slice_of_it(service: Callable[..., InferenceService]) -> None:
    assert activator_slice(service("demo"), SLEEP, BOUNDS, 20001, "fd00::7")["addressType"] == "IPv6"
