"""The parts of the spec that say how a service is reached and watched: endpoint, observability.

Invariants: as in service.py: frozen, with the CRD's defaults and rules.
Knows nothing of the children an InferenceService gets.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_operator.spec.reader import Reader

DNS_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
DNS_LABEL_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
HOST_PATTERN = r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
SECRET_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
OTLP_PATTERN = r"^(https?://[^ /?#@]+(/[^ ?#]*)?)?$"
MOST_A_MINUTE = 1_000_000_000


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
class InferencePool:
    """An InferencePool of the pods, whose endpoint picker is a Service of the same namespace.

    `failure_mode`: what a Gateway does with a request while the picker does not answer: FailClose refuses it, FailOpen
    sends it to any pod.
    """

    picker: str
    port: int = 9002
    failure_mode: str = "FailClose"


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
    )
    reference.finish()
    r.finish()
    return pool


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
