"""How the ranks of one model are spread over machines: what is said of it at the start, and what of that is refused.

Invariants: plain data, torch-free. The secret that nodes share is never part of it, only the name of its file.
Knows nothing of how nodes find each other (`ranks/nodes`).
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_runtime.errors import ConfigError

MASTER_PORT = 29501
JOIN_SECONDS = 1800
SECRET_VARIABLE = "STOKER_NODE_SECRET"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The settings of a node, in torchrun's and vLLM's words.

    `nnodes` nodes have as many ranks each; this one is `node_rank`, of which 0 leads: it has the API and rank 0. The
    others reach it at `master_addr`:`master_port`, for which both sides wait up to `node_join_seconds`.
    `node_secret_file` holds what all of them must know ("": the variable SECRET_VARIABLE does).
    """

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = MASTER_PORT
    node_secret_file: str = ""
    node_join_seconds: int = JOIN_SECONDS

    def validate_nodes(self, ranks: int, engines: int) -> None:
        """Raises ConfigError unless `engines` of `ranks` can be spread so."""
        if self.nnodes < 1:
            raise ConfigError(f"nnodes is {self.nnodes}; it must be at least 1.", param="nnodes")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"node_rank is {self.node_rank} of {self.nnodes} nodes; it must be from 0 to nnodes - 1.",
                param="node_rank",
            )
        if self.nnodes == 1:
            return
        if ranks % self.nnodes:
            raise ConfigError(
                f"nnodes is {self.nnodes}, which does not divide the {ranks} ranks of tensor_parallel_size · "
                "pipeline_parallel_size: every node has as many ranks.",
                param="nnodes",
            )
        if engines > 1:
            raise ConfigError(
                f"nnodes is {self.nnodes}, and data_parallel_size {engines}: several engines are on one machine only.",
                param="nnodes",
            )
        if not 1 <= self.master_port <= 65535:
            raise ConfigError(
                f"master_port is {self.master_port}; it must be from 1 to 65535, and the same on all nodes.",
                param="master_port",
            )
        if self.node_join_seconds < 1:
            raise ConfigError(
                f"node_join_seconds is {self.node_join_seconds}; it must be at least 1.", param="node_join_seconds"
            )
