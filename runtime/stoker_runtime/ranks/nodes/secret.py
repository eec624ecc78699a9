"""What all nodes of a group must know: read from a file or a variable, never from a command line.

Invariants: the secret stands in no message and no configuration.
Knows nothing of how it is proved.
"""

from __future__ import annotations

import os
from pathlib import Path

from stoker_runtime.errors import ConfigError
from stoker_runtime.nodes import SECRET_VARIABLE, NodeSettings

LEAST_BYTES = 16


def read_secret(settings: NodeSettings) -> bytes:
    """The secret of a node among several. Raises ConfigError where it, or the leader's address, is not given."""
    if not settings.master_addr:
        raise ConfigError(
            f"nnodes is {settings.nnodes}, so master_addr is needed: the name or address of node 0.",
            param="master_addr",
        )
    path = settings.node_secret_file
    if path:
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="node_secret_file") from error
    else:
        secret = os.environ.get(SECRET_VARIABLE, "").strip().encode()
    where = path or SECRET_VARIABLE
    if not secret:
        raise ConfigError(
            f"nnodes is {settings.nnodes}, so a secret is needed that all nodes know, and {where} holds none: set "
            f"{SECRET_VARIABLE}, or give --node-secret-file.",
            param="node_secret_file",
        )
    if len(secret) < LEAST_BYTES:
        raise ConfigError(
            f"The secret in {where} has {len(secret)} bytes; it must have at least {LEAST_BYTES}, by chance, as "
            "`openssl rand -hex 32` gives them.",
            param="node_secret_file",
        )
    return secret
