"""Settings of the activator's process: frozen, from flags and `STOKER_*` variables, validated before anything starts.

Invariants: a bad value stops start-up with a message that names its key; nothing here is secret.
Knows nothing of any one service: what may be held for it, its EndpointSlice says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker_operator.settings import check_limits, check_log_level, read_values


@dataclass(frozen=True, slots=True)
class ActivatorSettings:
    """Everything the activator is told at start. Times are seconds, sizes MiB.

    `namespaces` empty: services of the whole cluster.
    """

    namespaces: tuple[str, ...] = ()
    http_port: int = 8080
    http_host: str = ""
    body_mib: int = 64
    held_mib: int = 256
    heartbeat_seconds: float = 10.0
    leave_seconds: float = 10.0
    drain_seconds: float = 660.0
    log_level: str = "info"


HELP = {
    "namespaces": "namespaces whose services' requests are held, comma separated; empty: all",
    "http_port": "port of /healthz, /readyz and /metrics",
    "http_host": "address of all ports; empty: every one of the pod's",
    "body_mib": "largest body of a request that is held",
    "held_mib": "all bodies that are held; what would exceed it is answered 503",
    "heartbeat_seconds": "a stream that is held gets a comment so often, so that nobody on the way gives it up",
    "leave_seconds": "after SIGTERM requests are taken for so long, until nobody is led here any more",
    "drain_seconds": "those that are held then wait so long for a pod at most; longer than any maxWait",
    "log_level": "debug, info, warning or error",
}


def from_arguments(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> ActivatorSettings:
    """Settings from flags, then `STOKER_*` variables, then defaults. Raises SettingsError; `--help` exits."""
    settings = ActivatorSettings(**read_values(ActivatorSettings, HELP, "activator", argv, environment))  # type: ignore[arg-type]
    check_limits(
        [
            ("http_port", settings.http_port, 0, 65535),
            ("body_mib", settings.body_mib, 1, 1024),
            ("held_mib", settings.held_mib, settings.body_mib, 65536),
            ("heartbeat_seconds", settings.heartbeat_seconds, 0.1, 300),
            ("leave_seconds", settings.leave_seconds, 0, 300),
            ("drain_seconds", settings.drain_seconds, 0, 86400),
        ]
    )
    check_log_level(settings.log_level)
    return settings
