"""What the engine of a replica that spans nodes is told of the others, and the names and labels of its group.

A group's pods run one command line. The group's controller gives each container the group's size, the pod's number and
the leader's address as variables, which the kubelet puts into the arguments.
Invariants: the secret that a group's pods share is a variable from a Secret, never an argument.
Knows nothing of pod templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator.spec.engine_guard import NODE_SECRET
from stoker_operator.spec.service import InferenceService

# Labels that the group's controller gives each pod.
SET_NAME = "leaderworkerset.sigs.k8s.io/name"
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
# Where the leader waits for the others; every other port is of the system's choice.
NODES_PORT = 29500
# How long the pods of a group wait for each other: one may have to wait for a node.
JOIN_SECONDS = 1800
SECRET_KEY = "secret"


def group_name(service: InferenceService) -> str:
    """The name of the LeaderWorkerSet, of its Service, by which its pods find each other, and of their Secret."""
    return f"{service.name}-nodes"


def index_of(pod: Mapping[str, Any], label: str = GROUP_INDEX) -> str:
    """A pod's number, of its group or in it; "" of one that belongs to no group."""
    return str((pod["metadata"].get("labels") or {}).get(label, ""))


def arguments() -> list[str]:
    """What `stoker serve` is told of the other nodes."""
    found = ["--nnodes", "$(LWS_GROUP_SIZE)", "--node-rank", "$(LWS_WORKER_INDEX)"]
    found += ["--master-addr", "$(LWS_LEADER_ADDRESS)", "--master-port", str(NODES_PORT)]
    return [*found, "--node-join-seconds", str(JOIN_SECONDS)]


def secret_variable(service: InferenceService) -> dict[str, Any]:
    """The variable by which a group's pods know each other."""
    reference = {"name": group_name(service), "key": SECRET_KEY}
    return {"name": NODE_SECRET, "valueFrom": {"secretKeyRef": reference}}
