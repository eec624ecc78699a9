"""The kinds of objects that the operator reads and writes, and where an API server keeps them.

Invariants: plain data; a kind that a cluster may lack is in OPTIONAL, and is asked for before it is used.
Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Kind:
    """Where the objects of one kind live."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """The URL path of a collection, an object or a subresource; namespace "" is every namespace."""
        root = "api" if "/" not in self.api_version else "apis"
        parts = [
            root,
            self.api_version,
            *(("namespaces", quote(namespace)) if namespace else ()),
            self.plural,
        ]
        parts += [quote(part) for part in (name, subresource) if part]
        return "/" + "/".join(parts)


INFERENCE_SERVICE = Kind("stoker.dev/v1alpha1", "InferenceService", "inferenceservices")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
SERVICE = Kind("v1", "Service", "services")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
POD = Kind("v1", "Pod", "pods")
EVENT = Kind("v1", "Event", "events")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")
CONTROLLER_REVISION = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
NODE = Kind("v1", "Node", "nodes")
JOB = Kind("batch/v1", "Job", "jobs")
DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
AUTOSCALER = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
ENDPOINT_SLICE = Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
ACCESS_REVIEW = Kind("authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
INGRESS = Kind("networking.k8s.io/v1", "Ingress", "ingresses")
# Kinds that a cluster may lack.
HTTP_ROUTE = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
INFERENCE_POOL = Kind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")
POD_MONITOR = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
PROMETHEUS_RULE = Kind("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules")
SCALED_OBJECT = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
LEADER_WORKER_SET = Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
OPTIONAL = (SCALED_OBJECT, HTTP_ROUTE, INFERENCE_POOL, POD_MONITOR, PROMETHEUS_RULE, LEADER_WORKER_SET)
# Of the copies on nodes' own disks.
NAMESPACE = Kind("v1", "Namespace", "namespaces")
VOLUME = Kind("v1", "PersistentVolume", "persistentvolumes")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
# Of groups of pods, and of the custom metrics API's registration.
SECRET = Kind("v1", "Secret", "secrets")
API_SERVICE = Kind("apiregistration.k8s.io/v1", "APIService", "apiservices")
CLUSTER_ROLE = Kind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles")
BY_NAME = {
    kind.kind: kind
    for kind in (
        SERVICE_ACCOUNT, SERVICE, CLAIM, POD, DEPLOYMENT, REPLICA_SET, JOB, DISRUPTION_BUDGET, AUTOSCALER,
        CONTROLLER_REVISION, NETWORK_POLICY, INGRESS, CONFIG_MAP, ENDPOINT_SLICE, SECRET, *OPTIONAL,
    )
}  # fmt: skip
