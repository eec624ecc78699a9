"""What stands around groups of pods: the Service by which they find each other, and the secret they share.

Invariants: the Secret's value stands in no manifest: it is made up where the Secret is written.
Knows nothing of the pods themselves.
"""

from __future__ import annotations

from stoker_operator.manifests.groups.leader_worker_set import LEADER_WORKER_SET
from stoker_operator.manifests.groups.nodes import SET_NAME, group_name
from stoker_operator.manifests.identity import Manifest, child, labels, stamped
from stoker_operator.spec.service import InferenceService

SERVICE = ("v1", "Service")
SECRET = ("v1", "Secret")


def group_service(service: InferenceService) -> Manifest:
    """The headless Service that gives each pod of the groups a name, ready or not: they are ready once they have met.

    The groups' controller would make one of its own; but a Service of another of that name it would take for it.
    """
    headless = child(service, SERVICE, group_name(service), "nodes")
    chosen = {SET_NAME: group_name(service)}
    return stamped(headless | {"spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": chosen}})


def group_secret(service: InferenceService) -> Manifest:
    """The Secret that the pods of all groups share, without its value. It goes with the LeaderWorkerSet."""
    meta = {"name": group_name(service), "namespace": service.namespace, "labels": labels(service, "nodes")}
    return {"apiVersion": SECRET[0], "kind": SECRET[1], "metadata": meta, "type": "Opaque", "immutable": True}


def group_owner(service: InferenceService) -> tuple[str, str]:
    """(kind, name) of the object with which the Secret goes."""
    return LEADER_WORKER_SET[1], group_name(service)
