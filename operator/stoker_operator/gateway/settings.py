"""Settings of the gateway's process: frozen, from flags and `STOKER_*` variables, validated before anything starts.

Invariants: a bad value stops start-up with a message that names its key; nothing here is secret.
Knows nothing of models.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker_operator.settings import SettingsError, check_limits, check_log_level, read_values


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Everything the gateway is told at start. Times are seconds, sizes MiB.

    `namespaces` empty: services of the whole cluster. `keys_file` empty: nobody is asked for a key. `prepare`: write
    what Envoy needs to start, and end.
    """

    namespaces: tuple[str, ...] = ()
    folder: str = "/run/stoker"
    port: int = 8080
    metrics_port: int = 9902
    admin_port: int = 9901
    host: str = ""
    http_port: int = 8081
    keys_file: str = ""
    requests_per_minute: int = 0
    body_mib: int = 64
    leave_seconds: float = 10.0
    drain_seconds: float = 600.0
    prepare: bool = False
    log_level: str = "info"


HELP = {
    "namespaces": "namespaces whose services are served, comma separated; empty: all",
    "folder": "folder that Envoy follows; nobody else may read it, for API keys are in it",
    "port": "Envoy's, for clients",
    "metrics_port": "Envoy's, for scrapers: /stats/prometheus",
    "admin_port": "Envoy's own interface, on loopback",
    "host": "address of all other ports; empty: every one of the pod's",
    "http_port": "this process's port of /healthz, /readyz and /metrics",
    "keys_file": "file with one API key a line, followed; empty: anybody who reaches the gateway may use it",
    "requests_per_minute": "requests to models that each key may send in a minute, by this replica's count; 0: any",
    "body_mib": "largest body of a request",
    "leave_seconds": "after SIGTERM requests are taken for so long, until nobody is led here any more",
    "drain_seconds": "requests that are under way then have so long to end",
    "prepare": "true: write what Envoy needs to start, and end",
    "log_level": "debug, info, warning or error",
}


def from_arguments(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> GatewaySettings:
    """Settings from flags, then `STOKER_*` variables, then defaults. Raises SettingsError; `--help` exits."""
    settings = GatewaySettings(**read_values(GatewaySettings, HELP, "gateway", argv, environment))  # type: ignore[arg-type]
    check_limits(
        [
            ("port", settings.port, 1, 65535),
            ("metrics_port", settings.metrics_port, 1, 65535),
            ("admin_port", settings.admin_port, 1, 65535),
            ("http_port", settings.http_port, 0, 65535),
            ("requests_per_minute", settings.requests_per_minute, 0, 1_000_000),
            ("body_mib", settings.body_mib, 1, 1024),
            ("leave_seconds", settings.leave_seconds, 0, 300),
            ("drain_seconds", settings.drain_seconds, 0, 86400),
        ]
    )
    ports = (settings.port, settings.metrics_port, settings.admin_port, settings.http_port)
    if len(set(ports)) < len(ports):
        raise SettingsError(f"port, metrics_port, admin_port and http_port are {ports}; each must be another one.")
    if not os.path.isabs(settings.folder):
        raise SettingsError(f"folder is {settings.folder!r}; it must be an absolute path.")
    check_log_level(settings.log_level)
    return settings
