"""The settings of `stoker serve` that spread a model's ranks over nodes: a part of the table in flags.py.

Invariants: as there. The secret that nodes share is no flag, for other users of a machine see command lines.
Knows nothing of the engine's settings.
"""

from __future__ import annotations

from stoker_runtime.settings.flag import NODES, Flag
from stoker_runtime.settings.values import integer, text

NODE_FLAGS: tuple[Flag, ...] = (
    Flag("nnodes", "nnodes", integer(1), NODES, "nodes that share the ranks, each as many", "N", aliases=("n",)),
    Flag("node-rank", "node_rank", integer(0), NODES, "which of them this is; 0 leads", "N", aliases=("r",)),
    Flag("master-addr", "master_addr", text, NODES, "name or address of node 0, as the others reach it", "HOST"),
    Flag("master-port", "master_port", integer(1), NODES, "port at which node 0 awaits the others", "PORT"),
    Flag("node-join-seconds", "node_join_seconds", integer(1), NODES, "how long nodes wait for each other", "SECONDS"),
    Flag(
        "node-secret-file",
        "node_secret_file",
        text,
        NODES,
        "what all nodes must know; without it STOKER_NODE_SECRET",
        "FILE",
    ),
)
"""The flags, in the order of the help."""
