"""What the engine's pods and the prefetch pods have in common: identity, security, placement, volumes.

Invariants: every pod meets the restricted Pod Security profile, has a read-only root and no API token.
Knows nothing of what the containers do.
"""

from __future__ import annotations

import copy
from typing import Any

from stoker_operator.manifests.identity import labels, selector
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

USER = 65532
MODELS = "/models"
TERMINATION_LOG = "/dev/termination-log"
CONTAINER_SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}


def image(service: InferenceService, settings: Settings) -> str:
    """The runtime image of this service."""
    return service.runtime.image or settings.runtime_image


def base_spec(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """The part of a pod's spec that no container decides. Where each namespace has users of its own, the cluster sets
    user and group.
    """
    user = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER} if settings.fixed_user else {}
    spec: dict[str, Any] = {
        "serviceAccountName": service.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **user,
            # Without this the kubelet walks every file of a large cache at each pod start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    optional: dict[str, Any] = {
        "runtimeClassName": service.placement.runtime_class_name,
        "priorityClassName": service.placement.priority_class_name,
        "schedulerName": service.placement.scheduler_name,
        "imagePullSecrets": [{"name": name} for name in _pull_secrets(service)],
    }
    return spec | placement(service) | {key: value for key, value in optional.items() if value}


def _pull_secrets(service: InferenceService) -> list[str]:
    """The logins of the images, that of a model among them, without the same twice."""
    login = service.model.secret_ref if service.cache.mode == "Image" else None
    return list(dict.fromkeys([*service.pod_template.image_pull_secrets, *([login.name] if login else ())]))


def placement(service: InferenceService) -> dict[str, Any]:
    """The part of a pod's spec that says on which nodes it may run."""
    wanted = {
        "nodeSelector": dict(service.placement.node_selector),
        "tolerations": [dict(item) for item in service.placement.tolerations],
        "affinity": _affinity(service),
    }
    return {key: value for key, value in wanted.items() if value}


def beside_the_engine(service: InferenceService, affinity: dict[str, Any]) -> dict[str, Any]:
    """The spec's affinity, and a wish for the node of the engine's pods."""
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": selector(service)}}
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    pods = affinity.get("podAffinity") or {}
    wishes = [*(pods.get(preferred) or ()), {"weight": 100, "podAffinityTerm": term}]
    return affinity | {"podAffinity": {**pods, preferred: wishes}}


def engine_metadata(service: InferenceService) -> dict[str, Any]:
    """The engine's pod template's metadata: ours, and what the spec adds. A prefetch gets none of the latter: a sidecar
    that is injected into a Job keeps it from ever being complete.
    """
    extra = service.pod_template
    found: dict[str, Any] = {"labels": {**extra.labels, **labels(service, "engine")}}
    return found | ({"annotations": dict(extra.annotations)} if extra.annotations else {})


def _affinity(service: InferenceService) -> dict[str, Any]:
    """The spec's affinity; each of its node terms also asks for one of the GPU products."""
    affinity, products = copy.deepcopy(dict(service.placement.affinity)), service.resources.gpu_products
    if not products:
        return affinity
    product = {"key": "nvidia.com/gpu.product", "operator": "In", "values": list(products)}
    node = affinity.setdefault("nodeAffinity", {})
    required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        term | {"matchExpressions": [*(term.get("matchExpressions") or ()), product]} for term in terms
    ]
    return affinity


def scratch(size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(volume, mount) of a writable /tmp, where HOME and the compilers' caches live."""
    return {"name": "tmp", "emptyDir": {"sizeLimit": size}}, {"name": "tmp", "mountPath": "/tmp"}


def models_mount(*, read_only: bool) -> dict[str, Any]:
    """The mount of the model cache."""
    mount: dict[str, Any] = {"name": "models", "mountPath": MODELS}
    return mount | {"readOnly": True} if read_only else mount
