"""Plans what stands around the pods: NetworkPolicy, Ingress or HTTPRoute, InferencePool, monitoring.

Invariants: pure. An object whose kind this cluster does not serve is not planned, and a condition says so; one that
the spec no longer asks for goes.
Knows nothing of the pods themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator import manifests
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Condition, Delete, ensure
from stoker_operator.plan.wording import listed
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]
_KINDS = ("NetworkPolicy", "Ingress", "HTTPRoute", "InferencePool", "PodMonitor", "PrometheusRule", "ConfigMap")


def endpoint_actions(
    service: InferenceService, observed: Observed, share: int = 0, *, grouped: bool = False
) -> list[Action]:
    """The objects around the pods, and the end of those that are not wanted any more. `share`: percent of the route's
    requests for a canary; `grouped`: there are groups of pods, which talk to each other.
    """
    endpoint, watch = service.endpoint, service.observability
    wanted: list[tuple[manifests.Manifest, str]] = []
    if endpoint.network_policy:
        policy = manifests.network_policy(service, grouped=grouped)
        wanted.append((policy, "pods are reached on one port and reach nothing"))
    if endpoint.ingress is not None and "Ingress" not in observed.without:
        wanted.append((manifests.ingress(service, endpoint.ingress), "clients come from outside"))
    pool = endpoint.inference_pool if "InferencePool" in observed.served else None
    if pool is not None:
        wanted.append((manifests.inference_pool(service, pool), "an endpoint picker chooses the pod"))
    if endpoint.http_route is not None and "HTTPRoute" in observed.served:
        route = manifests.http_route(service, endpoint.http_route, pool=pool is not None, share=share)
        wanted.append((route, "clients come through a Gateway"))
    if watch.pod_monitor and "PodMonitor" in observed.served:
        wanted.append((manifests.pod_monitor(service), "Prometheus scrapes the pods"))
    if watch.rules and "PrometheusRule" in observed.served:
        wanted.append((manifests.prometheus_rule(service), "Prometheus watches the service"))
    # Nothing says whether Grafana is there; where the Prometheus operator is, it usually is too.
    if watch.dashboard and "PodMonitor" in observed.served and "Dashboard" not in observed.without:
        wanted.append((manifests.dashboard(service), "Grafana shows the service"))
    # A list of adapters is plan/adapters/plan.py's; where dashboards are off, nobody may delete one either.
    kinds = tuple(kind for kind in _KINDS if kind != "ConfigMap" or "Dashboard" not in observed.without)
    return converge(
        observed, wanted, kinds, "the spec does not ask for it any more", others=(manifests.list_name(service),)
    )


def converge(
    observed: Observed,
    wanted: list[tuple[manifests.Manifest, str]],
    kinds: tuple[str, ...],
    gone: str,
    others: tuple[str, ...] = (),
) -> list[Action]:
    """Make `wanted` so, and delete every child of `kinds` that is neither wanted nor one of the `others`, by name."""
    keep = {(manifest["kind"], manifest["metadata"]["name"]) for manifest, _ in wanted}
    actions: list[Action] = [
        Delete(kind, name, item["metadata"]["uid"], gone)
        for kind, name, item in observed.of_kinds(*kinds)
        if name not in others
        and (kind, name) not in keep
        and "deletionTimestamp" not in item["metadata"]
    ]
    for manifest, why in wanted:
        actions += ensure(observed.child(manifest), manifest, why)
    return actions


def endpoint_conditions(service: InferenceService, observed: Observed, *, held: bool = False) -> list[Condition]:
    """EndpointReady and Monitored. `held`: requests are held while no pod is ready."""
    return [_endpoint_ready(service, observed, held), _monitored(service, observed)]


def _endpoint_ready(service: InferenceService, observed: Observed, held: bool) -> Condition:
    found = _published(service, observed)
    if found.status != "True" or observed.rollout.ready:
        return found
    if held:
        return _ready("True", "Held", f"The activator holds requests until a pod is ready. {found.message}")
    return no_pod_ready(found.message)


def no_pod_ready(where: str) -> Condition:
    """EndpointReady while nobody answers behind an address that is there; `where` says where it is."""
    return _ready("False", "NoPodReady", f"No pod is ready to answer. {where}")


def _published(service: InferenceService, observed: Observed) -> Condition:
    endpoint, url = service.endpoint, manifests.public_url(service)
    if endpoint.inference_pool is not None:
        lacking = _pool_lacking(service, observed)
        if lacking is not None:
            return lacking
    if endpoint.ingress is not None:
        if "Ingress" in observed.without:
            return _ready("False", "FeatureOff", not_given("Ingresses", "ingress"))
        live = observed.children.get(("Ingress", service.name))
        addresses = ((live or {}).get("status", {}).get("loadBalancer") or {}).get("ingress")
        if addresses:
            where = addresses[0].get("hostname") or addresses[0].get("ip")
            return _ready("True", "Published", f"{url} is served at {where}.")
        text = (
            f"No ingress controller has given Ingress {service.name} an address yet. Check endpoint.ingress.className"
        )
        return _ready("False", "NoAddress", f"{text}.")
    if endpoint.http_route is not None:
        return _route_ready(service, observed, url)
    return _ready("True", "InCluster", f"{url} is served inside the cluster.")


def _pool_lacking(service: InferenceService, observed: Observed) -> Condition | None:
    """Why no endpoint picker is asked, as far as it can be seen here; None where nothing speaks against it."""
    meanwhile = "Until then requests go to the Service, and no picker is asked."
    if "InferencePool" in observed.without:
        return _ready("False", "FeatureOff", f"{not_given('InferencePools', 'inferencePool')} {meanwhile}")
    if "InferencePool" not in observed.served:
        text = f"No API serves {manifests.INFERENCE_POOL[0]}. Install the inference extension. {meanwhile}"
        return _ready("False", "InferencePoolMissing", text)
    refused = _refused(observed, "InferencePool", service.name)
    return _ready("False", "PoolNotAccepted", refused) if refused else None


def _refused(observed: Observed, kind: str, name: str) -> str:
    """What a Gateway says against a child of this kind; "" = nothing."""
    live = observed.children.get((kind, name), {})
    for parent in (live.get("status") or {}).get("parents") or ():
        for condition in parent.get("conditions") or ():
            if condition["type"] in ("Accepted", "ResolvedRefs") and condition["status"] == "False":
                return f"Gateway {parent['parentRef']['name']}: {condition.get('message', '')}"
    return ""


def _route_ready(service: InferenceService, observed: Observed, url: str) -> Condition:
    if "HTTPRoute" in observed.without:
        return _ready("False", "FeatureOff", not_given("HTTPRoutes", "gatewayApi"))
    if "HTTPRoute" not in observed.served:
        text = "No API serves gateway.networking.k8s.io/v1. Install the Gateway API, or use endpoint.ingress."
        return _ready("False", "GatewayApiMissing", text)
    refused = _refused(observed, "HTTPRoute", service.name)
    if refused:
        return _ready("False", "NotAccepted", refused)
    live = observed.children.get(("HTTPRoute", service.name), {})
    parents = (live.get("status") or {}).get("parents") or ()
    if not parents:
        return _ready("False", "NoGateway", f"No Gateway has taken HTTPRoute {service.name} yet. Check parentRefs.")
    return _ready("True", "Accepted", f"{url} is served by Gateway {parents[0]['parentRef']['name']}.")


def _ready(status: str, reason: str, message: str) -> Condition:
    return Condition("EndpointReady", status, reason, message)


def not_given(objects: str, feature: str) -> str:
    """What is said where the chart gave the operator no right to what the spec asks for."""
    return f"The operator may not make {objects} here: the chart's features.{feature} is off."


def _monitored(service: InferenceService, observed: Observed) -> Condition:
    watch = service.observability
    asked = {
        "PodMonitor": watch.pod_monitor,
        "PrometheusRule": watch.rules,
        "dashboard ConfigMap": watch.dashboard and "Dashboard" not in observed.without,
    }
    names = [name for name, wanted in asked.items() if wanted]
    if not names:
        return Condition("Monitored", "False", "Off", "spec.observability turns it off.")
    if {"PodMonitor", "PrometheusRule"} <= observed.without:
        text = not_given("PodMonitors and PrometheusRules", "prometheusOperator")
        return Condition("Monitored", "False", "FeatureOff", text)
    if not {"PodMonitor", "PrometheusRule"} & observed.served:
        text = f"No API serves monitoring.coreos.com/v1, so no {listed(names, 'or')} is made"
        text += ". The pods' own /metrics is always there."
        return Condition("Monitored", "False", "PrometheusOperatorMissing", text)
    needs = {"dashboard ConfigMap": "PodMonitor"}
    lacking = [name for name in names if needs.get(name, name) not in observed.served]
    if lacking:
        text = f"No API serves what is needed for: {', '.join(lacking)}."
        return Condition("Monitored", "False", "KindMissing", text)
    return Condition("Monitored", "True", "Applied", f"Made: {', '.join(names)}.")
