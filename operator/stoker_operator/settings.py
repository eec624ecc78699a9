"""Settings of the operator's process: frozen, from flags and `STOKER_*` variables, validated before
anything starts.

Invariants: a bad value stops start-up with a message that names its key; nothing here is secret.
Knows nothing of Kubernetes' API or of any one InferenceService.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from stoker_operator.spec.quantity import is_quantity

# What the operator can do without, and may have no right to. The last two are both ConfigMaps.
OPTIONAL_KINDS = (
    "HorizontalPodAutoscaler", "ScaledObject", "Ingress", "HTTPRoute", "InferencePool", "PodMonitor", "PrometheusRule",
    "LeaderWorkerSet", "Dashboard", "AdapterList",
)  # fmt: skip
DEFAULT_RUNTIME_IMAGE = "stoker/runtime:0.1.0"


class SettingsError(ValueError):
    """A flag or variable that cannot be used; the message names the key and what is allowed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the operator is told at start. Times are seconds; `read_rate_mb` is MB per second.

    `namespaces` empty watches the whole cluster. `read_rate_mb` is the slowest storage for which the start-up
    probe must still leave time to load the weights.
    """

    runtime_image: str = DEFAULT_RUNTIME_IMAGE
    hub_endpoint: str = ""
    cache_size: str = "50Gi"
    cache_storage_class: str = ""
    node_cache_class: str = ""
    namespaces: tuple[str, ...] = ()
    exclude_namespaces: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    rollout_parallel: int = 1
    follow_seconds: int = 600
    fixed_user: bool = True
    lease_name: str = "stoker-operator"
    lease_namespace: str = "default"
    identity: str = ""
    lease_seconds: float = 15.0
    workers: int = 16
    api_concurrency: int = 32
    reconciles_per_second: float = 200.0
    resync_seconds: float = 300.0
    http_port: int = 8080
    http_host: str = "0.0.0.0"
    pod_timeout_seconds: float = 10.0
    read_rate_mb: int = 100
    prometheus_url: str = ""
    metrics_adapter_port: int = 0
    metrics_adapter_mode: str = "Auto"
    metrics_adapter_service: str = ""
    metrics_adapter_secret: str = ""
    metrics_adapter_issuer: str = "operator"
    metrics_adapter_owner: str = ""
    activator_service: str = ""
    log_level: str = "info"


HELP = {
    "runtime_image": "image of the engine and the prefetch Job, where the spec names none",
    "hub_endpoint": "hub-compatible server for hf:// models, where the spec names none (air-gapped clusters)",
    "cache_size": "size of a model cache volume, where the spec names none",
    "cache_storage_class": "storage class of model caches, where the spec names none",
    "node_cache_class": "storage class of the copies on nodes' own disks; empty: there is no node cache",
    "namespaces": "namespaces to watch, comma separated; empty: all",
    "exclude_namespaces": "namespaces to leave alone where all are watched, comma separated",
    "without": f"kinds that services may not ask for, comma separated, of {', '.join(OPTIONAL_KINDS)}",
    "rollout_parallel": "services whose pods change at a time for a new default image or operator; 0: all",
    "follow_seconds": "how often a followed revision is looked up (spec.model.updatePolicy: Follow)",
    "fixed_user": "false: pods name no user, for clusters that give each namespace its own",
    "lease_name": "name of the leader's Lease",
    "lease_namespace": "namespace of the leader's Lease",
    "identity": "this replica's name in the Lease; default: the host's name",
    "lease_seconds": "a leader silent for so long is replaced",
    "workers": "reconciles that run at once",
    "api_concurrency": "requests to the API server in flight at once",
    "reconciles_per_second": "ceiling of the work queue",
    "resync_seconds": "every object is reconciled at least this often",
    "http_port": "port of /healthz, /readyz and /metrics",
    "http_host": "address of /healthz, /readyz and /metrics",
    "pod_timeout_seconds": "how long to wait for a pod's answer",
    "read_rate_mb": "slowest storage to allow for in the start-up probe, MB/s",
    "prometheus_url": "Prometheus that KEDA asks, for services with autoscaling.engine KEDA",
    "metrics_adapter_port": "port of the built-in custom metrics API; 0: it is off",
    "metrics_adapter_mode": "Auto: gives way to another adapter's custom metrics API; On: stands beside it",
    "metrics_adapter_service": "Service of the custom metrics API, in the Lease's namespace",
    "metrics_adapter_secret": "Secret there with tls.crt, tls.key and ca.crt of the custom metrics API",
    "metrics_adapter_issuer": "operator: it fills and renews that Secret itself; given: somebody else does",
    "metrics_adapter_owner": "ClusterRole with which the API's registration goes",
    "activator_service": "Service of the activator, in the Lease's namespace; empty: there is none, and nothing sleeps",
    "log_level": "debug, info, warning or error",
}


def from_arguments(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags, then `STOKER_*` variables, then defaults. Raises SettingsError; `--help` exits."""
    values = read_values(Settings, HELP, "operator", argv, environment)
    values.setdefault("identity", socket.gethostname())
    return _checked(Settings(**values))  # type: ignore[arg-type]


def read_values(
    kind: type, words: Mapping[str, str], command: str, argv: Sequence[str], environment: Mapping[str, str]
) -> dict[str, object]:
    """What flags and variables say of the fields of `kind`, a dataclass; `words` is the help of each.

    Raises SettingsError; `--help` exits.
    """
    parser = argparse.ArgumentParser(prog=f"stoker {command}", description=f"Run the Stoker {command}.")
    for item in fields(kind):
        shown = item.default if item.default not in ("", ()) else "none"
        parser.add_argument(
            "--" + item.name.replace("_", "-"), metavar="VALUE", help=f"{words[item.name]} (default: {shown})"
        )
    given = vars(parser.parse_args(list(argv)))
    values: dict[str, object] = {}
    for item in fields(kind):
        text = given[item.name]
        text = environment.get("STOKER_" + item.name.upper()) if text is None else text
        if text is not None:
            values[item.name] = _convert(item.name, item.default, text)
    return values


def _convert(name: str, default: object, text: str) -> object:
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise SettingsError(f"{name} is {text!r}; it must be true or false.")
        return text == "true"
    kind = int if isinstance(default, int) else float
    try:
        return kind(text)
    except ValueError:
        raise SettingsError(f"{name} is {text!r}; it must be {'an integer' if kind is int else 'a number'}.") from None


def _checked(settings: Settings) -> Settings:
    limits = [
        ("lease_seconds", settings.lease_seconds, 3, 3600),
        ("workers", settings.workers, 1, 256),
        ("rollout_parallel", settings.rollout_parallel, 0, 1000),
        ("follow_seconds", settings.follow_seconds, 60, 604800),
        ("api_concurrency", settings.api_concurrency, 1, 1024),
        ("reconciles_per_second", settings.reconciles_per_second, 0.1, 10000),
        ("resync_seconds", settings.resync_seconds, 1, 86400),
        ("http_port", settings.http_port, 0, 65535),
        ("metrics_adapter_port", settings.metrics_adapter_port, 0, 65535),
        ("pod_timeout_seconds", settings.pod_timeout_seconds, 0.1, 300),
        ("read_rate_mb", settings.read_rate_mb, 1, 100000),
    ]
    check_limits(limits)
    if not is_quantity(settings.cache_size):
        raise SettingsError(f"cache_size is {settings.cache_size!r}; it must be a quantity such as 50Gi.")
    check_log_level(settings.log_level)
    for name, url in (("hub_endpoint", settings.hub_endpoint), ("prometheus_url", settings.prometheus_url)):
        if url and not url.startswith(("http://", "https://")):
            raise SettingsError(f"{name} is {url!r}; it must start with http:// or https://.")
    for name, chosen, allowed in (
        ("metrics_adapter_mode", settings.metrics_adapter_mode, ("Auto", "On")),
        ("metrics_adapter_issuer", settings.metrics_adapter_issuer, ("operator", "given")),
    ):
        if chosen not in allowed:
            raise SettingsError(f"{name} is {chosen!r}; it must be {' or '.join(allowed)}.")
    if settings.metrics_adapter_port:
        for name in ("metrics_adapter_service", "metrics_adapter_secret", "metrics_adapter_owner"):
            if not getattr(settings, name):
                raise SettingsError(f"{name} is empty; metrics_adapter_port needs it.")
    if unknown := set(settings.without) - set(OPTIONAL_KINDS):
        raise SettingsError(f"without names {', '.join(sorted(unknown))}; it may name {', '.join(OPTIONAL_KINDS)}.")
    if settings.namespaces and settings.exclude_namespaces:
        raise SettingsError("exclude_namespaces is for where all namespaces are watched; namespaces names them.")
    if not settings.runtime_image:
        raise SettingsError("runtime_image is empty; it must name an image.")
    return settings


def check_limits(limits: Iterable[tuple[str, float, float, float]]) -> None:
    """Each a name, its value, the least and the most. Raises SettingsError."""
    for name, value, least, most in limits:
        if not least <= value <= most:
            raise SettingsError(f"{name} is {value}; it must be between {least} and {most}.")


def check_log_level(level: str) -> None:
    """Raises SettingsError."""
    if level not in ("debug", "info", "warning", "error"):
        raise SettingsError(f"log_level is {level!r}; it must be debug, info, warning or error.")
