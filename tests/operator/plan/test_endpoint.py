"""plan/endpoint.py: what stands around the pods, where the cluster knows its kinds, and what the conditions say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker_operator.plan.actions import Apply, Condition, Delete

Object = dict[str, Any]
INGRESS = {"ingress": {"host": "a.b"}}
ROUTE = {"httpRoute": {"parentRefs": [{"name": "gw"}], "hostnames": ["a.b"]}}


POOL = {"inferencePool": {"endpointPickerRef": {"name": "epp", "port": 5}}}


def made(there: Any) -> list[str]:
    return [a.manifest["kind"] for a in there.plan().actions if isinstance(a, Apply)]


@pytest.mark.parametrize(
    ("spec", "served", "kinds"),
    [
        ({}, (), []),
        ({"endpoint": INGRESS}, (), ["Ingress"]),
        ({"endpoint": ROUTE}, (), []),
        ({"endpoint": ROUTE}, ("HTTPRoute",), ["HTTPRoute"]),
        ({"endpoint": ROUTE | POOL}, ("HTTPRoute",), ["HTTPRoute"]),
        ({"endpoint": ROUTE | POOL}, ("HTTPRoute", "InferencePool"), ["InferencePool", "HTTPRoute"]),
        ({"endpoint": POOL}, ("InferencePool",), ["InferencePool"]),
        ({}, ("PodMonitor", "PrometheusRule"), ["PodMonitor", "PrometheusRule", "ConfigMap"]),
        ({"observability": {"podMonitor": "Off"}}, ("PodMonitor", "PrometheusRule"), ["PrometheusRule", "ConfigMap"]),
        ({"observability": {"dashboard": "Off"}}, ("PodMonitor",), ["PodMonitor"]),
    ],
)
def test_what_is_made(world: Any, spec: Object, served: tuple[str, ...], kinds: list[str]) -> None:
    there = world(**spec).pod().answered()
    there.served = frozenset(served)
    assert made(there) == kinds


@pytest.mark.parametrize(
    ("spec", "without", "kinds", "named"),
    [
        ({"endpoint": INGRESS}, ("Ingress",), ["PodMonitor", "PrometheusRule", "ConfigMap"], "features.ingress"),
        ({"endpoint": ROUTE}, ("HTTPRoute",), ["PodMonitor", "PrometheusRule", "ConfigMap"], "features.gatewayApi"),
        (
            {"endpoint": ROUTE | POOL},
            ("InferencePool",),
            ["HTTPRoute", "PodMonitor", "PrometheusRule", "ConfigMap"],
            "features.inferencePool",
        ),
        ({}, ("PodMonitor", "PrometheusRule"), [], "features.prometheusOperator"),
        ({}, ("Dashboard",), ["PodMonitor", "PrometheusRule"], "Made: PodMonitor, PrometheusRule."),
    ],
)
def test_what_the_operator_was_not_given_is_said_and_not_tried(
    world: Any, spec: Object, without: tuple[str, ...], kinds: list[str], named: str
) -> None:
    there = world(**spec).pod().answered()
    there.served = frozenset({"PodMonitor", "PrometheusRule", "HTTPRoute", "InferencePool"} - set(without))
    there.without = frozenset(without)
    assert made(there) == kinds
    assert named in " ".join(item.message for item in there.plan().conditions)


def test_what_the_spec_drops_goes(world: Any) -> None:
    there = world(endpoint=INGRESS).pod().answered()
    [action] = there.plan().actions
    there.children["Ingress", "demo"] = there.live(action.manifest)
    assert there.plan().actions == ()
    there.service = replace(there.service, endpoint=replace(there.service.endpoint, ingress=None, network_policy=False))
    gone = [a.kind for a in there.plan().actions if isinstance(a, Delete)]
    assert sorted(gone) == ["Ingress", "NetworkPolicy"]


def test_a_route_leads_to_the_pool_where_there_is_one(world: Any) -> None:
    there = world(endpoint=ROUTE | POOL).pod().answered()
    for served, kind in ((("HTTPRoute",), None), (("HTTPRoute", "InferencePool"), "InferencePool")):
        there.served = frozenset(served)
        asked = [action.manifest for action in there.plan().actions if isinstance(action, Apply)]
        [route] = [manifest for manifest in asked if manifest["kind"] == "HTTPRoute"]
        [backend] = route["spec"]["rules"][0]["backendRefs"]
        assert backend.get("kind") == kind


def condition(there: Any, kind: str) -> Condition:
    found: Condition = next(item for item in there.plan().conditions if item.type == kind)
    return found


ADDRESS = {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}
TAKEN = {"parents": [{"parentRef": {"name": "gw"}, "conditions": [{"type": "Accepted", "status": "True"}]}]}
REFUSED = {
    "parents": [
        {
            "parentRef": {"name": "gw"},
            "conditions": [{"type": "Accepted", "status": "False", "message": "no listener for a.b"}],
        }
    ]
}


@pytest.mark.parametrize(
    ("endpoint", "kind", "status", "served", "expected"),
    [
        ({}, "", {}, (), ("True", "InCluster", "inside the cluster")),
        (INGRESS, "Ingress", {}, (), ("False", "NoAddress", "className")),
        (INGRESS, "Ingress", ADDRESS, (), ("True", "Published", "192.0.2.7")),
        (ROUTE, "", {}, (), ("False", "GatewayApiMissing", "Install the Gateway API")),
        (ROUTE, "HTTPRoute", {}, ("HTTPRoute",), ("False", "NoGateway", "Check parentRefs")),
        (ROUTE, "HTTPRoute", TAKEN, ("HTTPRoute",), ("True", "Accepted", "Gateway gw")),
        (ROUTE, "HTTPRoute", REFUSED, ("HTTPRoute",), ("False", "NotAccepted", "no listener for a.b")),
        (POOL, "", {}, (), ("False", "InferencePoolMissing", "inference extension")),
        (POOL, "InferencePool", {}, ("InferencePool",), ("True", "InCluster", "inside the cluster")),
        (POOL, "InferencePool", REFUSED, ("InferencePool",), ("False", "PoolNotAccepted", "Gateway gw: no listener")),
        (ROUTE | POOL, "HTTPRoute", TAKEN, ("HTTPRoute",), ("False", "InferencePoolMissing", "go to the Service")),
        (ROUTE | POOL, "HTTPRoute", TAKEN, ("HTTPRoute", "InferencePool"), ("True", "Accepted", "Gateway gw")),
    ],
)
def test_endpoint_ready(
    world: Any, endpoint: Object, kind: str, status: Object, served: tuple[str, ...], expected: tuple[str, str, str]
) -> None:
    there = world(endpoint=endpoint).pod().answered()
    there.served = frozenset(served)
    if kind:
        there.children[kind, "demo"] = {"metadata": {"name": "demo", "uid": "u"}, "status": status}
    found = condition(there, "EndpointReady")
    assert (found.status, found.reason) == expected[:2]
    assert expected[2] in found.message


@pytest.mark.parametrize(
    ("spec", "served", "reason"),
    [
        ({}, (), "PrometheusOperatorMissing"),
        ({}, ("PodMonitor", "PrometheusRule"), "Applied"),
        ({"observability": {"podMonitor": "Off", "rules": "Off", "dashboard": "Off"}}, ("PodMonitor",), "Off"),
        ({}, ("PodMonitor",), "KindMissing"),
        ({"observability": {"rules": "Off"}}, ("PodMonitor",), "Applied"),
        ({"observability": {"podMonitor": "Off", "rules": "Off"}}, ("PrometheusRule",), "KindMissing"),
    ],
)
def test_monitored(world: Any, spec: Object, served: tuple[str, ...], reason: str) -> None:
    there = world(**spec).pod().answered()
    there.served = frozenset(served)
    assert condition(there, "Monitored").reason == reason


def test_a_pod_that_waits_for_its_keys_says_so(world: Any) -> None:
    there = world(endpoint={"auth": {"apiKeysSecretRef": {"name": "keys"}}})
    waiting = [{"name": "verify", "state": {"waiting": {"reason": "PodInitializing"}}}]
    there.pod(ready=False, phase="Pending", initContainerStatuses=waiting)
    assert "is there a Secret keys with a key keys?" in condition(there, "Ready").message
