"""The parts of the spec that say how a service is reached and watched: endpoint, observability.

Invariants: as in service.py: frozen, with the CRD's defaults and rules.
Knows nothing of the children an InferenceService gets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker_operator.spec import engine_guard
from stoker_operator.spec.engine_arguments import told, variable
from stoker_operator.spec.reader import Reader

DNS_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
DNS_LABEL_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
HOST_PATTERN = r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
SECRET_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
OTLP_PATTERN = r"^(https?://[^ /?#@]+(/[^ ?#]*)?)?$"
MOST_A_MINUTE = 1_000_000_000
# The variable of a pod's own address, which the topic of its KV events names.
POD_IP = "POD_IP"
# On which an engine's pod listens for clients, and the pods of a group for each other.
TAKEN_PORTS = (8000, 29500)


@dataclass(frozen=True, slots=True)
class SecretRef:
    """One key of a Secret in the service's own namespace."""

    name: str
    key: str = "token"


@dataclass(frozen=True, slots=True)
class Ingress:
    """An Ingress of this host. `class_name` "" = the cluster's default."""

    host: str
    class_name: str = ""


@dataclass(frozen=True, slots=True)
class Parent:
    """A Gateway's listener. "" and 0 = unsaid."""

    name: str
    namespace: str = ""
    section: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """An HTTPRoute on these listeners, for these hosts."""

    parents: tuple[Parent, ...]
    hostnames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Each pod publishes what its prefix cache gains and loses, at `port`. `picker_labels`: of the pods of the
    namespace that may connect; none, every one may.
    """

    port: int = 5557
    picker_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferencePool:
    """An InferencePool of the pods, whose endpoint picker is a Service of the same namespace.

    `failure_mode`: what a Gateway does with a request while the picker does not answer: FailClose refuses it, FailOpen
    sends it to any pod. `kv_events` None: nothing is told of prefix caches.
    """

    picker: str
    port: int = 9002
    failure_mode: str = "FailClose"
    kv_events: KvEvents | None = None


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What each API key, or without keys all callers together, may ask of each pod in a minute; 0 = no limit."""

    requests: int = 0
    tokens: int = 0


NO_LIMIT = RateLimit()


@dataclass(frozen=True, slots=True)
class PodTls:
    """TLS of the pods themselves: the Secret of their certificate, and of the authority of their clients' ("": none).

    With an authority a client must show a certificate of it, but for probes and metrics.
    """

    secret: str
    client_ca_secret: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How clients reach the service, at `port` of its name. `api_keys`: the Secret's key holds one API key a line."""

    port: int = 8000
    ingress: Ingress | None = None
    http_route: HttpRoute | None = None
    inference_pool: InferencePool | None = None
    tls_secret: str = ""
    api_keys: SecretRef | None = None
    rate_limit: RateLimit = NO_LIMIT
    pod_tls: PodTls | None = None
    network_policy: bool = True

    @property
    def kv_events(self) -> KvEvents | None:
        """What the pods publish for the pool's picker, if anything."""
        return self.inference_pool.kv_events if self.inference_pool is not None else None


@dataclass(frozen=True, slots=True)
class Observability:
    """Whether the Prometheus operator's objects are made where it is installed, and where traces go ("": nowhere)."""

    pod_monitor: bool = True
    rules: bool = True
    dashboard: bool = True
    otlp_endpoint: str = ""


def read_secret_ref(r: Reader, key: str) -> SecretRef | None:
    """A Secret's name and key; `key` is the default key. None when nothing is said."""
    if not r.raw:
        return None
    reference = SecretRef(
        r.text("name", pattern=DNS_NAME_PATTERN, longest=253, required=True),
        r.text("key", default=key, pattern=SECRET_KEY_PATTERN, longest=253),
    )
    r.finish()
    return reference


def read_endpoint(r: Reader) -> Endpoint:
    """spec.endpoint."""
    auth, tls, limit = r.mapping("auth"), r.mapping("tls"), r.mapping("rateLimit")
    endpoint = Endpoint(
        port=r.integer("port", least=1, most=65535, default=8000),
        ingress=_ingress(r.mapping("ingress")) if "ingress" in r.raw else None,
        http_route=_http_route(r.mapping("httpRoute")) if "httpRoute" in r.raw else None,
        inference_pool=_inference_pool(r.mapping("inferencePool")) if "inferencePool" in r.raw else None,
        tls_secret=tls.text("secretName", pattern=DNS_NAME_PATTERN, longest=253, required="tls" in r.raw),
        api_keys=read_secret_ref(auth.mapping("apiKeysSecretRef"), "keys"),
        rate_limit=RateLimit(
            limit.integer("requestsPerMinute", least=0, most=MOST_A_MINUTE),
            limit.integer("tokensPerMinute", least=0, most=MOST_A_MINUTE),
        ),
        pod_tls=_pod_tls(r.mapping("podTLS")) if "podTLS" in r.raw else None,
        network_policy=r.boolean("networkPolicy", default=True),
    )
    if endpoint.ingress is not None and endpoint.http_route is not None:
        r.problems.append(f"{r.path}: give one of ingress and httpRoute")
    if endpoint.ingress is not None and endpoint.inference_pool is not None:
        r.problems.append(f"{r.path}: an Ingress knows no InferencePool; use httpRoute")
    if endpoint.tls_secret and endpoint.ingress is None:
        r.problems.append(f"{r.path}.tls: is the Ingress's; a Gateway has its own")
    r.problems.extend(_pod_tls_problems(endpoint, r.path))
    for part in (auth, tls, limit, r):
        part.finish()
    return endpoint


def _pod_tls(r: Reader) -> PodTls:
    found = PodTls(
        r.text("secretName", pattern=DNS_NAME_PATTERN, longest=253, required=True),
        r.text("clientCASecretName", pattern=f"({DNS_NAME_PATTERN})?", longest=253),
    )
    r.finish()
    return found


def _pod_tls_problems(endpoint: Endpoint, path: str) -> list[str]:
    """What does not go with TLS to the pods, in the CRD's words."""
    if endpoint.pod_tls is None:
        return []
    found = []
    if endpoint.http_route is not None or endpoint.inference_pool is not None:
        found.append(f"{path}.podTLS: a Gateway would speak HTTP to the pods; leave out httpRoute and inferencePool")
    if endpoint.pod_tls.client_ca_secret and endpoint.ingress is not None:
        found.append(
            f"{path}.podTLS: an Ingress shows the pods no certificate; leave out ingress or clientCASecretName"
        )
    return found


def _ingress(r: Reader) -> Ingress:
    found = Ingress(
        host=r.text("host", pattern=HOST_PATTERN, longest=253, required=True),
        class_name=r.text("className", pattern=f"({DNS_NAME_PATTERN})?", longest=253),
    )
    r.finish()
    return found


def _http_route(r: Reader) -> HttpRoute:
    parents = []
    raw = r.objects("parentRefs", most=8)
    if not raw:
        r.problems.append(f"{r.path}.parentRefs: is required")
    for index, entry in enumerate(raw):
        item = Reader(entry, f"{r.path}.parentRefs[{index}]", r.problems)
        parents.append(
            Parent(
                item.text("name", pattern=DNS_NAME_PATTERN, longest=253, required=True),
                item.text("namespace", pattern=f"({DNS_NAME_PATTERN})?", longest=63),
                item.text("sectionName", pattern=f"({DNS_NAME_PATTERN})?", longest=253),
                item.integer("port", least=0, most=65535),
            )
        )
        item.finish()
    route = HttpRoute(tuple(parents), r.texts("hostnames", pattern=HOST_PATTERN, most=16, longest=253))
    r.finish()
    return route


def _inference_pool(r: Reader) -> InferencePool:
    reference = r.mapping("endpointPickerRef", required=True)
    pool = InferencePool(
        picker=reference.text("name", pattern=DNS_LABEL_PATTERN, longest=63, required=True),
        port=reference.integer("port", least=1, most=65535, default=9002),
        failure_mode=reference.choice("failureMode", ("FailClose", "FailOpen")),
        kv_events=_kv_events(r.mapping("kvEvents")) if "kvEvents" in r.raw else None,
    )
    reference.finish()
    r.finish()
    return pool


def _kv_events(r: Reader) -> KvEvents:
    found = KvEvents(
        r.integer("port", least=1024, most=65535, default=5557),
        r.text_map("pickerLabels", pattern=LABEL_VALUE_PATTERN, most=16, longest=63),
    )
    for key in found.picker_labels:
        if re.search(LABEL_KEY_PATTERN, key) is None:
            r.problems.append(f"{r.path}.pickerLabels: {key!r} must be a label, as key or domain/key")
    if found.port in TAKEN_PORTS:
        r.problems.append(f"{r.path}.port: is {found.port}, where a pod listens already; choose another one")
    r.finish()
    return found


def kv_events_problems(args: Sequence[str], env: Sequence[Mapping[str, Any]], engines: int) -> Iterator[str]:
    """What does not go with endpoint.inferencePool.kvEvents, of an engine's arguments and variables, and of several."""
    path = "endpoint.inferencePool.kvEvents"
    if engines > 1:
        yield f"spec.{path}: tells of one engine's cache; it needs parallelism.data of 1, with replicas in its place"
    if engine_guard.says("kv-events-config", args):
        yield f"spec.runtime.args: --kv-events-config is what {path} sets; leave one of them out"
    names = {str(item.get("name")) for item in env}
    if variable("kv-events-config") in names:
        yield f"spec.runtime.env: {variable('kv-events-config')} is what {path} sets; leave one of them out"
    if POD_IP in names:
        yield f"spec.runtime.env: {POD_IP} is the pod's own address beside {path}; give yours another name"
    said = told(args, env, ("runner", "enable-prefix-caching"))
    if said.get("runner", "auto") not in ("auto", "generate"):
        yield f"spec.runtime.args: a model that pools (--runner) has no prefix cache; leave {path} out"
    if said.get("enable-prefix-caching", "true").lower() in ("false", "0", "no", "off"):
        yield f"spec.runtime.args: {path} tells of the prefix cache; leave it out, or --no-enable-prefix-caching"


def never_wakes_problems(endpoint: Endpoint) -> Iterator[str]:
    """What a service that sleeps cannot have."""
    needed = "it needs autoscaling.min of at least 1"
    if endpoint.inference_pool is not None:
        yield f"spec.endpoint.inferencePool: holds pods alone, so no request would wake the service; {needed}"
    if endpoint.pod_tls is not None:
        yield f"spec.endpoint.podTLS: the activator, which holds requests while no pod runs, speaks HTTP; {needed}"


def read_observability(r: Reader) -> Observability:
    """spec.observability."""
    wanted = Observability(
        pod_monitor=r.choice("podMonitor", ("Auto", "Off")) == "Auto",
        rules=r.choice("rules", ("Auto", "Off")) == "Auto",
        dashboard=r.choice("dashboard", ("Auto", "Off")) == "Auto",
        otlp_endpoint=r.text("otlpEndpoint", pattern=OTLP_PATTERN, longest=1024),
    )
    r.finish()
    return wanted
