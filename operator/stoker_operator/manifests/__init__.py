"""Manifests: pure functions from an InferenceService (and what is known of its model) to Kubernetes
objects."""

from stoker_operator.manifests.cache import cache_key, claim_name, prefetch_job, source_id, volume_claim
from stoker_operator.manifests.identity import Manifest, applied_hash, labels, selector
from stoker_operator.manifests.network import metrics_service, service_url, web_service
from stoker_operator.manifests.workload import deployment, disruption_budget, service_account

__all__ = [
    "Manifest",
    "applied_hash",
    "cache_key",
    "claim_name",
    "deployment",
    "disruption_budget",
    "labels",
    "metrics_service",
    "prefetch_job",
    "selector",
    "service_account",
    "service_url",
    "source_id",
    "volume_claim",
    "web_service",
]
