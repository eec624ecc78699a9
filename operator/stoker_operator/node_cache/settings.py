"""Settings of the node cache agent: frozen, from flags and `STOKER_*` variables, validated before anything starts.

Invariants: a bad value stops start-up with a message that names its key; nothing here is secret.
Knows nothing of any one model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from stoker_operator.settings import SettingsError, check_limits, check_log_level, read_values
from stoker_operator.spec.quantity import is_quantity, quantity


@dataclass(frozen=True, slots=True)
class NodeCacheSettings:
    """Everything the agent is told at start. `folder` is the same path on the node and in the agent's container."""

    node: str = ""
    folder: str = "/var/lib/stoker/models"
    size: str = "200Gi"
    storage_class: str = "stoker-node-cache"
    group: int = 65532
    look_seconds: float = 60.0
    http_port: int = 8080
    http_host: str = ""
    log_level: str = "info"

    @property
    def limit_bytes(self) -> int:
        """The most that all models may take."""
        return int(quantity(self.size))


HELP = {
    "node": "the node's name; required",
    "folder": "where the models lie, on the node and in this container alike",
    "size": "what all models together may take, as 200Gi; what is used least is given up before",
    "storage_class": "storage class of the claims that are served",
    "group": "group that may read and write the folders: the pods' fsGroup",
    "look_seconds": "everything is looked at least so often; at once, where something waits",
    "http_port": "port of /healthz, /readyz and /metrics",
    "http_host": "its address; empty: every one of the pod's",
    "log_level": "debug, info, warning or error",
}


def from_arguments(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> NodeCacheSettings:
    """Settings from flags, then `STOKER_*` variables, then defaults. Raises SettingsError; `--help` exits."""
    settings = NodeCacheSettings(**read_values(NodeCacheSettings, HELP, "node-cache", argv, environment))  # type: ignore[arg-type]
    for name in ("node", "storage_class"):
        if not getattr(settings, name):
            raise SettingsError(f"{name} is empty; it must be given.")
    if not PurePosixPath(settings.folder).is_absolute() or settings.folder == "/":
        raise SettingsError(f"folder is {settings.folder!r}; it must be an absolute path below /.")
    if not is_quantity(settings.size) or settings.limit_bytes < 1:
        raise SettingsError(f"size is {settings.size!r}; it must be a quantity such as 200Gi.")
    check_limits(
        [
            ("group", settings.group, 0, 2**31 - 1),
            ("look_seconds", settings.look_seconds, 0.1, 3600),
            ("http_port", settings.http_port, 0, 65535),
        ]
    )
    check_log_level(settings.log_level)
    return settings
