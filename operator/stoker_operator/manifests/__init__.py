"""Pure: a service, and what is known of its model, → Kubernetes objects. One file for what belongs together.

Must never know: what is in the cluster, but for what a live object of the same name must keep.
A new child: its builder in the file of its neighbours, exported here, planned in `plan/`, its kind in
`cluster/kinds.py`; golden files in `tests/operator/manifests/golden` show it.
"""

from stoker_operator.manifests.adapters import (
    Listed,
    adapter_list,
    adapter_room,
    as_model,
    list_name,
    listed_as,
    read_list,
)
from stoker_operator.manifests.cache import (
    claim_name,
    claim_users,
    is_repair,
    left_claim,
    owns_claim,
    prefetch_job,
    retain_seconds,
    volume_claim,
)
from stoker_operator.manifests.canary import as_served, canary_deployment, canary_key, canary_name, canary_service
from stoker_operator.manifests.dashboard import dashboard
from stoker_operator.manifests.edge import (
    INFERENCE_POOL,
    http_route,
    inference_pool,
    ingress,
    network_policy,
    public_url,
)
from stoker_operator.manifests.fetching.fill import fill_job
from stoker_operator.manifests.fetching.lookup import lookup_job, lookup_pod
from stoker_operator.manifests.groups.around import group_owner, group_secret, group_service
from stoker_operator.manifests.groups.leader_worker_set import (
    LEADER_WORKER_SET,
    group_progress_seconds,
    held_workload,
    is_group,
    pods_of,
    revision_template,
    rolling_update,
    workload_key,
    workload_manifest,
)
from stoker_operator.manifests.groups.nodes import SECRET_KEY, group_name
from stoker_operator.manifests.identity import Manifest, applied_hash, cache_key, labels, selector, source_id
from stoker_operator.manifests.network import metrics_service, service_url, web_service
from stoker_operator.manifests.observability import pod_monitor, prometheus_rule
from stoker_operator.manifests.revision import live_template_key, record_manifest, record_name, template_key
from stoker_operator.manifests.scaling import pod_autoscaler, scaled_object
from stoker_operator.manifests.verification import verify_job, verify_pod
from stoker_operator.manifests.workload import (
    Variant,
    deployment,
    disruption_budget,
    engine_template,
    service_account,
)

__all__ = [
    "INFERENCE_POOL",
    "LEADER_WORKER_SET",
    "SECRET_KEY",
    "Listed",
    "Manifest",
    "Variant",
    "adapter_list",
    "adapter_room",
    "applied_hash",
    "as_model",
    "as_served",
    "cache_key",
    "canary_deployment",
    "canary_key",
    "canary_name",
    "canary_service",
    "claim_name",
    "claim_users",
    "dashboard",
    "deployment",
    "disruption_budget",
    "engine_template",
    "fill_job",
    "group_name",
    "group_owner",
    "group_progress_seconds",
    "group_secret",
    "group_service",
    "held_workload",
    "http_route",
    "inference_pool",
    "ingress",
    "is_group",
    "is_repair",
    "labels",
    "left_claim",
    "list_name",
    "listed_as",
    "live_template_key",
    "lookup_job",
    "lookup_pod",
    "metrics_service",
    "network_policy",
    "owns_claim",
    "pod_autoscaler",
    "pod_monitor",
    "pods_of",
    "prefetch_job",
    "prometheus_rule",
    "public_url",
    "read_list",
    "record_manifest",
    "record_name",
    "retain_seconds",
    "revision_template",
    "rolling_update",
    "scaled_object",
    "selector",
    "service_account",
    "service_url",
    "source_id",
    "template_key",
    "verify_job",
    "verify_pod",
    "volume_claim",
    "web_service",
    "workload_key",
    "workload_manifest",
]
