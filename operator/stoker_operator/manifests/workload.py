"""The Deployment that runs the engine, its ServiceAccount and its PodDisruptionBudget.

Invariants: `replicas` is only set when the plan says so, so an autoscaler may own it; termination grace is
preStop + drain + margin, so no stream that may still run is cut; GPU requests equal limits; the model is
mounted read-only and verified before the engine starts.
Knows nothing of how the model came to the volume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker_operator.manifests import adapters, copies, kv_events, pod, tls
from stoker_operator.manifests.cache import engine_volume, served_path
from stoker_operator.manifests.fetching.asking import (
    again_arguments,
    fetch_container,
    in_place_arguments,
    source_volumes,
)
from stoker_operator.manifests.host_memory import host_memory
from stoker_operator.manifests.identity import Manifest, child, members_selector, selector, stamped
from stoker_operator.manifests.pod_template import merge_pod_template
from stoker_operator.manifests.revision import TEMPLATE_KEY, template_key
from stoker_operator.manifests.verification import verify_container
from stoker_operator.settings import Settings
from stoker_operator.spec.engine_arguments import variable
from stoker_operator.spec.engine_guard import NEUTRAL
from stoker_operator.spec.model import IN_SITU, KV_CACHE_DTYPES, QUANTIZATIONS
from stoker_operator.spec.quantity import quantity
from stoker_operator.spec.service import FetchedModel, InferenceService

DEPLOYMENT = ("apps/v1", "Deployment")
PORT = 8000
# Kueue admits the Deployment's pods one by one from this queue.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GRACE_MARGIN_SECONDS = 15
STARTUP_BASE_SECONDS = 120
# A revision is told by its record. An old ReplicaSet only keeps pods that were evicted, and these the volume that they
# name: it would never go when the service moves on to another model.
OLD_REPLICA_SETS = 0
# Bytes a second.
_SLOWEST_FETCH = 5 * 10**6
KEYS_VOLUME = "api-keys"
KEYS_FOLDER = "/etc/stoker/api-keys"
KEYS_FILE = "keys"
# The engine starts no more threads than this says, and fewer where a small model keeps fewer busy.
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Variant:
    """What of a Deployment depends on the moment. `replicas` None: another writer's; `template` None: the spec's."""

    replicas: int | None
    surge: int
    unavailable: int
    template: Mapping[str, Any] | None = None


def service_account(service: InferenceService) -> Manifest:
    """An identity of its own, with no token and no rights."""
    account = child(service, ("v1", "ServiceAccount"), service.name, "engine")
    return stamped(account | {"automountServiceAccountToken": False})


def disruption_budget(service: InferenceService, *, grouped: bool = False) -> Manifest:
    """So many pods at a time are evicted, one by default; a single replica can still be drained. Of groups (`grouped`)
    all pods count: a group goes with any of them.
    """
    budget = child(service, ("policy/v1", "PodDisruptionBudget"), service.name, "engine")
    wanted = service.disruption
    spec = {
        "maxUnavailable": wanted.max_unavailable,
        "selector": members_selector(service) if grouped else {"matchLabels": selector(service)},
        # A pod that never became ready protects nothing and must not block a node's drain, unless it is asked for.
        "unhealthyPodEvictionPolicy": "IfHealthyBudget" if wanted.protect_startup else "AlwaysAllow",
    }
    return stamped(budget | {"spec": spec})


def startup_seconds(settings: Settings, model: FetchedModel) -> int:
    """How long a pod may take to become ready: the weights at the slowest storage, plus a base."""
    return STARTUP_BASE_SECONDS + math.ceil(model.bytes / (settings.read_rate_mb * 10**6))


def progress_seconds(service: InferenceService, settings: Settings, model: FetchedModel) -> int:
    """How long a new revision may take until a pod of it is ready."""
    usual = startup_seconds(settings, model) + 600 + _fetch_seconds(service, model)
    return service.rollout.progress_deadline or usual


def engine_template(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    """The pod template that the spec asks for."""
    spec = merge_pod_template(_engine_pod(service, settings, model), service.pod_template)
    return {"metadata": pod.engine_metadata(service), "spec": spec}


def deployment(service: InferenceService, settings: Settings, model: FetchedModel, variant: Variant) -> Manifest:
    """The engine's pods."""
    workload = child(service, DEPLOYMENT, service.name, "engine")
    template = variant.template or engine_template(service, settings, model)
    workload["metadata"]["annotations"] = {TEMPLATE_KEY: template_key(template)}
    if service.placement.queue_name:
        workload["metadata"]["labels"] |= {QUEUE_LABEL: service.placement.queue_name}
    spec: dict[str, Any] = {
        "revisionHistoryLimit": OLD_REPLICA_SETS,
        "progressDeadlineSeconds": progress_seconds(service, settings, model),
        "paused": service.rollout.paused,
        "selector": {"matchLabels": selector(service)},
        "strategy": _strategy(service, variant),
        "template": template,
    }
    if variant.replicas is not None:
        spec["replicas"] = variant.replicas
    return stamped(workload | {"spec": spec})


def held_deployment(service: InferenceService, live: Mapping[str, Any], variant: Variant) -> Manifest:
    """The Deployment as it runs, with other `replicas`: for while there is nothing newer to roll out."""
    workload = child(service, DEPLOYMENT, service.name, "engine")
    template = variant.template or live["spec"]["template"]
    workload["metadata"]["annotations"] = {TEMPLATE_KEY: template_key(template)}
    strategy = live["spec"].get("strategy") or {}
    kept = {key: strategy[key] for key in ("type", "rollingUpdate") if key in strategy}
    spec: dict[str, Any] = {
        "revisionHistoryLimit": OLD_REPLICA_SETS,
        "progressDeadlineSeconds": live["spec"].get("progressDeadlineSeconds", 600),
        "paused": service.rollout.paused,
        "selector": {"matchLabels": selector(service)},
        "strategy": kept,
        "template": template,
    }
    if variant.replicas is not None:
        spec["replicas"] = variant.replicas
    return stamped(workload | {"spec": spec})


def _strategy(service: InferenceService, variant: Variant) -> dict[str, Any]:
    if service.rollout.strategy == "Recreate":
        return {"type": "Recreate"}
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": variant.surge, "maxUnavailable": variant.unavailable},
    }


def _engine_pod(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    tmp, tmp_mount = pod.scratch("4Gi")
    volumes: list[dict[str, Any]] = [
        engine_volume(service, settings, model),
        tmp,
        *tls.volumes(service),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": service.runtime.shm_size}},
    ]
    mounts = [pod.models_mount(read_only=True), tmp_mount, *tls.mounts(service)]
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    keys = service.endpoint.api_keys
    if keys is not None:
        items = [{"key": keys.key, "path": KEYS_FILE}]
        # Group-readable: the pod's fsGroup is the engine's own group.
        volumes.append({"name": KEYS_VOLUME, "secret": {"secretName": keys.name, "items": items, "defaultMode": 0o440}})
        mounts.append({"name": KEYS_VOLUME, "mountPath": KEYS_FOLDER, "readOnly": True})
    if service.model.adapters is not None:
        volumes.append(adapters.list_volume(service))
        mounts.append(adapters.list_mount())
    initial = _first_containers(service, settings, model)
    if service.cache.mode == "None":
        volumes += source_volumes(service)[0]
    drain = service.drain
    return (
        _placed(service, settings, model)
        | _spread(service)
        | _resource_claims(service)
        | {
            "terminationGracePeriodSeconds": drain.pre_stop + drain.timeout + GRACE_MARGIN_SECONDS,
            "initContainers": initial,
            "containers": [_engine_container(service, settings, model) | {"volumeMounts": mounts}],
            "volumes": volumes,
        }
    )


def _placed(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    """What pods have in common; with copies on nodes, a wish for those that have one."""
    spec = pod.base_spec(service, settings)
    if service.cache.mode != "Node":
        return spec
    return spec | {"affinity": copies.near_copies(service, model, spec.get("affinity") or {})}


def _first_containers(service: InferenceService, settings: Settings, model: FetchedModel) -> list[dict[str, Any]]:
    """What is done about the weights before the engine starts."""
    if service.cache.mode == "None":
        return [fetch_container(service, settings, again_arguments(service, settings, model))]
    # Weights that are served where they lie were hashed once; the volume is the user's. An image's digests are checked
    # by the node that pulls it.
    unchecked = service.in_place or service.cache.mode == "Image"
    verified = not unchecked or service.cache.verify == "Always"
    return [_verify_container(service, settings, model)] if verified else []


def _fetch_seconds(service: InferenceService, model: FetchedModel) -> int:
    """How long a pod may wait for what its node has not or pulls, or fetch itself."""
    return 0 if service.cache.has_volume else math.ceil(model.bytes / _SLOWEST_FETCH)


def _spread(service: InferenceService) -> dict[str, Any]:
    """topologySpreadConstraints, which count this service's own engine pods."""
    counted = {"labelSelector": {"matchLabels": selector(service)}}
    found = [dict(item) | counted for item in service.placement.topology_spread]
    return {"topologySpreadConstraints": found} if found else {}


def _resource_claims(service: InferenceService) -> dict[str, Any]:
    """The pod's claims on devices; the engine's container names them."""
    found = [{key: value for key, value in claim.items() if key != "request"} for claim in service.resources.claims]
    return {"resourceClaims": found} if found else {}


def _verify_container(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    arguments = ["fetch", "--verify-only", "--path", f"{pod.MODELS}/{model.path}", "--digest", model.digest]
    if service.in_place:
        arguments = ["fetch", *in_place_arguments(service), "--digest", model.digest]
    elif service.cache.verify == "Always":
        arguments.append("--full")
    return verify_container(service, settings, arguments)


def _engine_container(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    runtime, drain = service.runtime, service.drain
    arguments = ["serve", served_path(service, model), "--host", "0.0.0.0", "--port", str(PORT)]
    arguments += ["--served-model-name", *service.served_names]
    if runtime.context_length:
        arguments += ["--max-model-len", str(runtime.context_length)]
    if runtime.max_concurrency:
        arguments += ["--max-num-seqs", str(runtime.max_concurrency)]
    if service.model.quantization in IN_SITU:
        arguments += ["--isq", IN_SITU[service.model.quantization]]
    elif service.model.quantization != "Auto":
        arguments += ["--quantization", QUANTIZATIONS[service.model.quantization]]
    if service.model.kv_cache_dtype != "Auto":
        arguments += ["--kv-cache-dtype", KV_CACHE_DTYPES[service.model.kv_cache_dtype]]
    if service.parallelism.ranks > 1:
        arguments += ["--tensor-parallel-size", str(service.parallelism.tensor)]
        arguments += ["--pipeline-parallel-size", str(service.parallelism.pipeline)]
        arguments += ["--enable-expert-parallel"] if service.parallelism.expert else []
    if service.parallelism.data > 1:
        arguments += ["--data-parallel-size", str(service.parallelism.data)]
    if service.endpoint.api_keys is not None:
        arguments += ["--api-key-file", f"{KEYS_FOLDER}/{KEYS_FILE}"]
    arguments += [*tls.arguments(service), *_limit_arguments(service)]
    if service.observability.otlp_endpoint:
        arguments += ["--otlp-traces-endpoint", service.observability.otlp_endpoint]
    arguments += [*adapters.engine_arguments(service), *kv_events.arguments(service, PORT)]
    arguments += ["--drain-seconds", str(drain.timeout), *runtime.args]
    return {
        "name": "engine",
        "image": pod.image(service, settings),
        "command": ["stoker"],
        "args": arguments,
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "TRITON_CACHE_DIR", "value": "/tmp/triton"},
            *kv_events.variables(service),
            *(_own_settings() if runtime.env_from else ()),
            *_threads(service),
            *(dict(item) for item in runtime.env),
        ],
        **({"envFrom": [dict(item) for item in runtime.env_from]} if runtime.env_from else {}),
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}, *kv_events.ports(service)],
        "resources": _resources(service, model),
        "securityContext": dict(pod.CONTAINER_SECURITY),
        "terminationMessagePath": pod.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # Endpoints are withdrawn while the engine still answers; only then does it get SIGTERM and drains.
        "lifecycle": {"preStop": {"sleep": {"seconds": drain.pre_stop}}} if drain.pre_stop else {},
        # Every second: while a service wakes, requests wait for what it finds.
        "startupProbe": _probe(service, "/ready", period=1, timeout=1, failures=startup_seconds(settings, model)),
        "readinessProbe": _probe(service, "/ready", period=1, timeout=2, failures=3),
        # Lenient: a restart costs every running stream. /health itself sees an engine that stopped stepping.
        "livenessProbe": _probe(service, "/health", period=10, timeout=5, failures=6),
    }


def _limit_arguments(service: InferenceService) -> list[str]:
    limit, found = service.endpoint.rate_limit, []
    if limit.requests:
        found += ["--rate-limit-requests-per-minute", str(limit.requests)]
    if limit.tokens:
        found += ["--rate-limit-tokens-per-minute", str(limit.tokens)]
    return found


def _own_settings() -> list[dict[str, str]]:
    """Variables that a Secret or ConfigMap must not bring: what is said by name wins over what comes from those."""
    return [{"name": variable(name), "value": value} for name, value in NEUTRAL.items()]


def _threads(service: InferenceService) -> list[dict[str, str]]:
    """The bound on an engine's threads that its share of a node asks for, where the processors are what computes."""
    wanted = service.resources
    if wanted.on_gpu or not wanted.cpu or any(item["name"] == THREADS for item in service.runtime.env):
        return []
    # Without a CPU limit the engine sees all cores of the node, and would take them from its neighbours. Each of its
    # ranks computes with so many.
    return [{"name": THREADS, "value": str(max(1, int(quantity(wanted.cpu)) // service.pod_ranks))}]


def _probe(service: InferenceService, path: str, *, period: int, timeout: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": tls.scheme(service).upper()},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def _resources(service: InferenceService, model: FetchedModel) -> dict[str, Any]:
    wanted = service.resources
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if wanted.cpu:
        # No CPU limit: throttling the process that feeds the GPU costs more than it saves.
        requests["cpu"] = wanted.cpu
    for key, value in (("memory", wanted.memory), ("ephemeral-storage", wanted.ephemeral_storage)):
        if value:
            requests[key] = limits[key] = value
    host = host_memory(service, model)
    if host is not None and not wanted.memory:
        # No limit: the sum is an estimate, and what goes beyond it is taken only where the node has it.
        requests["memory"] = host.request
    if wanted.gpus:
        requests[wanted.gpu_resource] = limits[wanted.gpu_resource] = str(wanted.gpus)
    found: dict[str, Any] = {"requests": requests, "limits": limits}
    if wanted.claims:
        found["claims"] = [{key: claim[key] for key in ("name", "request") if key in claim} for claim in wanted.claims]
    return found
