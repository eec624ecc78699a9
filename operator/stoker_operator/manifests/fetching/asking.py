"""Who asks a source for a model: the containers and pods that run `stoker fetch`, what they are told, and the
credentials that they get.

Invariants: tokens reach a container by a secretKeyRef, a login by a mount, and neither is an argument.
Knows nothing of where what is fetched lies, and of when it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator.manifests import pod
from stoker_operator.manifests.identity import job_labels
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

JOB = ("batch/v1", "Job")
# The container whose report a prefetch is known by.
FETCH = "fetch"
PROGRESS_PORT = 8081
EXIT_PERMANENT = 3
LOGIN_FOLDER = "/etc/stoker/registry"
AZURE_IDENTITY = "azure.workload.identity/use"
_BRIEF_SECONDS = 600


def fetch_job_spec(service: InferenceService, labels: Mapping[str, str], template: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a Job that fetches, by pods of this template."""
    return {
        "backoffLimit": 4,
        # Long enough for `kubectl logs`; the result itself is kept in the service's status. Pods that are over keep the
        # room that they had on a node.
        "ttlSecondsAfterFinished": 86400 if service.cache.has_volume else _BRIEF_SECONDS,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": FETCH, "operator": "In", "values": [EXIT_PERMANENT]},
                },
                # A node that drains or dies says nothing about the source.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": job_labels(labels) | identity_labels(service)}, "spec": template},
    }


def fetch_pod(
    service: InferenceService, settings: Settings, models: Mapping[str, Any], arguments: list[str]
) -> dict[str, Any]:
    """The spec of a Job's pod that fetches onto the volume `models`."""
    tmp, _ = pod.scratch("1Gi")
    volumes = [dict(models), tmp, *source_volumes(service)[0]]
    container = fetch_container(service, settings, arguments)
    container["ports"] = [{"name": "progress", "containerPort": PROGRESS_PORT, "protocol": "TCP"}]
    # A pod, not a container, is one try: each keeps its own termination message, and backoffLimit counts
    # them.
    found = pod.base_spec(service, settings) | identity(service)
    return found | {"restartPolicy": "Never", "containers": [container], "volumes": volumes}


def fetch_container(service: InferenceService, settings: Settings, arguments: list[str]) -> dict[str, Any]:
    """A container that runs `stoker` with `arguments`; its pod has the volumes of model, source and /tmp."""
    mounts = [pod.models_mount(read_only=service.in_place), {"name": "tmp", "mountPath": "/tmp"}]
    return {
        "name": FETCH,
        "image": pod.image(service, settings),
        "command": ["stoker"],
        "args": arguments,
        **credentials(service),
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": dict(pod.CONTAINER_SECURITY),
        "terminationMessagePath": pod.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts + source_volumes(service)[1],
    }


def resolving_pod(service: InferenceService, settings: Settings, name: str, arguments: list[str]) -> dict[str, Any]:
    """The spec of a Job's pod that asks the source and brings nothing: its container runs `stoker` with `arguments`."""
    (tmp, tmp_mount), login = pod.scratch("100Mi"), registry_login(service)
    container = {
        "name": name,
        "image": pod.image(service, settings),
        "command": ["stoker"],
        "args": [*arguments, "--termination-log", pod.TERMINATION_LOG],
        **credentials(service),
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": dict(pod.CONTAINER_SECURITY),
        "terminationMessagePath": pod.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [tmp_mount, *(mount for _, mount in login)],
    }
    volumes = [tmp, *(volume for volume, _ in login)]
    spec = pod.base_spec(service, settings) | identity(service)
    return spec | {"restartPolicy": "Never", "containers": [container], "volumes": volumes}


def resolving_arguments(service: InferenceService, settings: Settings, revision: str) -> list[str]:
    """What it is told: to find out what `revision` stands for now."""
    how = "--resolve-image" if service.cache.mode == "Image" else "--resolve"
    arguments = ["fetch", how, "--uri", service.model.uri, "--revision", revision]
    return [*arguments, *endpoint_arguments(service, settings), *select_arguments(service)]


def source_volumes(service: InferenceService) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes, mounts) of what a fetch reads besides the network: a claim to copy from, a registry's login."""
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    claim = service.model.source_claim
    if claim is not None and not service.in_place:
        source = {"claimName": claim[0], "readOnly": True}
        volumes.append({"name": "source", "persistentVolumeClaim": source})
        mounts.append({"name": "source", "mountPath": "/source", "readOnly": True})
    for volume, mount in registry_login(service):
        volumes.append(volume)
        mounts.append(mount)
    return volumes, mounts


def identity(service: InferenceService) -> dict[str, Any]:
    """The ServiceAccount that may ask the source, for a pod's spec; the service's own where the spec names none."""
    return {"serviceAccountName": service.model.service_account} if service.model.service_account else {}


def identity_labels(service: InferenceService) -> dict[str, str]:
    """What Azure's webhook looks for; the clouds' others look at the ServiceAccount alone."""
    return {AZURE_IDENTITY: "true"} if service.model.scheme == "az" and service.model.service_account else {}


def registry_login(service: InferenceService) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(volume, mount) of a registry's login; none where there is none."""
    login = service.model.secret_ref if service.model.scheme == "oci" else None
    if login is None:
        return []
    items = [{"key": ".dockerconfigjson", "path": "config.json"}]
    volume = {"name": "login", "secret": {"secretName": login.name, "items": items}}
    return [(volume, {"name": "login", "mountPath": LOGIN_FOLDER, "readOnly": True})]


def credentials(service: InferenceService) -> dict[str, Any]:
    """The environment of who asks the source. A store's Secret comes whole: it names keys as the store's tools do."""
    secret = service.model.secret_ref
    environment: list[dict[str, Any]] = [{"name": "HOME", "value": "/tmp"}]
    if secret is None:
        return {"env": environment}
    if service.model.scheme == "oci":
        return {"env": [*environment, {"name": "DOCKER_CONFIG", "value": LOGIN_FOLDER}]}
    if service.model.in_store:
        return {"env": environment, "envFrom": [{"secretRef": {"name": secret.name}}]}
    reference = {"secretKeyRef": {"name": secret.name, "key": secret.key}}
    name = "MODELSCOPE_API_TOKEN" if service.model.scheme == "modelscope" else "HF_TOKEN"
    return {"env": [*environment, {"name": name, "valueFrom": reference}]}


def again_arguments(service: InferenceService, settings: Settings, known: FetchedModel) -> list[str]:
    """What `stoker fetch` is told that brings once more, elsewhere, what is known by its digest."""
    commits = service.model.scheme in ("hf", "modelscope")
    revision = known.resolved_revision if commits else service.model.revision
    arguments = source_arguments(service, settings, revision)
    return [*arguments, "--digest", known.digest, "--termination-log", pod.TERMINATION_LOG]


def source_arguments(service: InferenceService, settings: Settings, revision: str) -> list[str]:
    """What `stoker fetch` is told that brings `revision` onto the volume."""
    model, uri = service.model, service.model.uri
    if model.source_claim is not None:
        uri = f"file:///source/{model.source_claim[1]}".rstrip("/")
    arguments = ["fetch", "--uri", uri, "--revision", revision, "--dest", pod.MODELS]
    arguments += endpoint_arguments(service, settings)
    if model.secret_ref is not None and model.scheme == "https":
        arguments.append("--send-token")
    return [*arguments, *select_arguments(service)]


def in_place_arguments(service: InferenceService) -> list[str]:
    """What `stoker fetch` is told of weights that lie on the source claim."""
    claim = service.model.source_claim
    uri = f"file://{pod.MODELS}/{claim[1] if claim else ''}".rstrip("/")
    return ["--in-place", "--uri", uri, *select_arguments(service)]


def endpoint_arguments(service: InferenceService, settings: Settings) -> list[str]:
    """Which server is asked in the place of the URI's own."""
    endpoint = service.model.endpoint or (settings.hub_endpoint if service.model.scheme == "hf" else "")
    return ["--endpoint", endpoint] if endpoint else []


def select_arguments(service: InferenceService) -> list[str]:
    """Which of the source's files are meant, and what they must be."""
    model, arguments = service.model, []
    for flag, patterns in (("--allow", model.allow), ("--ignore", model.ignore)):
        for pattern in patterns:
            arguments += [flag, pattern]
    for name, digest in model.sha256:
        arguments += ["--sha256", f"{name}={digest}"]
    return arguments
