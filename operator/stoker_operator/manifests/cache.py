"""The model cache: a volume shared by every service of a namespace that serves the same files, and the
prefetch Job. Where no volume is shared (cache.mode Node and None) the Job fetches once, and finds out what it is.

Invariants: the volume's name depends only on what it holds and where, so two services with the same source
share it; a Job's name depends on the source, the volume's identity and the attempt, so a finished Job is
never run again and a volume that was replaced is filled again. Tokens reach the Job by a secretKeyRef only.
A claim that nobody wants retained is owned by its users, so Kubernetes ends it with the last of them.
Knows nothing of how a source is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stoker_operator.manifests import copies, pod
from stoker_operator.manifests.identity import (
    ATTEMPT_LABEL,
    BEGUN,
    CACHE_LABEL,
    COMPONENT,
    FIELD_MANAGER,
    MANAGED_BY,
    SOURCE_LABEL,
    Manifest,
    child,
    job_labels,
    short_hash,
    stamped,
)
from stoker_operator.manifests.revision import TEMPLATE_KEY, template_key
from stoker_operator.settings import Settings
from stoker_operator.spec.quantity import quantity
from stoker_operator.spec.service import GROUP, KIND, VERSION, FetchedModel, InferenceService

PROGRESS_PORT = 8081
EXIT_PERMANENT = 3
_BRIEF_SECONDS = 600
LOGIN_FOLDER = "/etc/stoker/registry"
AZURE_IDENTITY = "azure.workload.identity/use"
# On a cache claim, one annotation a user: its uid and the seconds for which it wants the claim retained.
USER_PREFIX = f"user.{GROUP}/"
CLAIM = ("v1", "PersistentVolumeClaim")
JOB = ("batch/v1", "Job")


def cache_key(service: InferenceService) -> str:
    """Names the volume: a hash of the source and of the kind of volume."""
    model, cache = service.model, service.cache
    return short_hash(
        [model.uri, model.revision, model.endpoint, model.allow, model.ignore, model.sha256,
         cache.storage_class_name, cache.access_mode]
    )  # fmt: skip


def claim_name(service: InferenceService) -> str:
    """The name of the volume claim that holds this service's model: the cache's, or one of the user's own; "" where
    pods share none.
    """
    if not service.cache.has_volume:
        return ""
    source = service.model.source_claim
    if service.in_place and source is not None:
        return source[0]
    return service.cache.existing_claim or f"models-{cache_key(service)}"


def owns_claim(service: InferenceService) -> bool:
    """Whether the operator makes and ends the claim; one of the user's own is never written to as an object."""
    return service.cache.has_volume and not (service.in_place or service.cache.existing_claim)


def claim_users(claim: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Who uses a live cache claim: service name → (uid, seconds for which it wants the claim retained)."""
    users = {}
    for key, value in (claim["metadata"].get("annotations") or {}).items():
        uid, _, seconds = str(value).partition(" ")
        if key.startswith(USER_PREFIX) and seconds.isdigit():
            users[key.removeprefix(USER_PREFIX)] = (uid, int(seconds))
    return users


def retain_seconds(claim: Mapping[str, Any]) -> int:
    """How long a live cache claim outlives its last use: the longest of what its users ask."""
    return max((seconds for _, seconds in claim_users(claim).values()), default=0)


def _users(service: InferenceService, live: Mapping[str, Any] | None) -> dict[str, tuple[str, int]]:
    """The users of the claim, this service among them."""
    users: dict[str, tuple[str, int]] = {}
    if live is not None:
        owners = {str(item["uid"]): str(item["name"]) for item in live["metadata"].get("ownerReferences") or ()}
        users = {name: (uid, 0) for uid, name in owners.items()} | claim_users(live)
        if owners:
            # Kubernetes takes the references to services that are gone away; their wishes go with them.
            users = {name: user for name, user in users.items() if user[0] in owners}
    return users | {service.name: (service.uid, service.cache.retain)}


def source_id(service: InferenceService, volume_uid: str) -> str:
    """Names one source on one volume; a result is only believed for the pair it was made for. Without a volume that
    pods share, the cache's mode stands for it.
    """
    return short_hash([cache_key(service), volume_uid])


def volume_claim(service: InferenceService, settings: Settings, live: Mapping[str, Any] | None = None) -> Manifest:
    """The shared claim. What other services need of the `live` one (their ownership, its size) is kept."""
    spec: dict[str, Any] = {
        "accessModes": [service.cache.access_mode],
        "resources": {"requests": {"storage": _size(service, settings, live)}},
    }
    storage_class = _storage_class(service, settings, live)
    spec |= {"storageClassName": storage_class} if storage_class else {}
    return _claim(claim_name(service), service.namespace, cache_key(service), _users(service, live), spec)


def left_claim(service: InferenceService, live: Mapping[str, Any]) -> Manifest:
    """A live claim without this service, which uses another by now; the others keep what they have."""
    meta, there = live["metadata"], live["spec"]
    users = {name: user for name, user in _users(service, live).items() if user[0] != service.uid}
    spec: dict[str, Any] = {
        "accessModes": list(there["accessModes"]),
        "resources": {"requests": {"storage": str(there["resources"]["requests"]["storage"])}},
    }
    spec |= {"storageClassName": there["storageClassName"]} if _sets_storage_class(live) else {}
    return _claim(meta["name"], service.namespace, meta["labels"][CACHE_LABEL], users, spec)


def _claim(
    name: str, namespace: str, key: str, users: Mapping[str, tuple[str, int]], spec: Mapping[str, Any]
) -> Manifest:
    owners = [_user_owner(user, uid) for user, (uid, _) in users.items()]
    if any(seconds for _, seconds in users.values()):
        owners = []  # it outlives its users: plan/retention.py ends it
    meta: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "labels": {
            "app.kubernetes.io/name": "stoker",
            COMPONENT: "cache",
            MANAGED_BY: "stoker",
            CACHE_LABEL: key,
        },
        "annotations": {f"{USER_PREFIX}{user}": f"{uid} {seconds}" for user, (uid, seconds) in sorted(users.items())},
        "ownerReferences": sorted(owners, key=lambda reference: reference["uid"]),
    }
    return stamped({"apiVersion": CLAIM[0], "kind": CLAIM[1], "metadata": meta, "spec": dict(spec)})


def _user_owner(name: str, uid: str) -> dict[str, str]:
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": name, "uid": uid}


def _size(service: InferenceService, settings: Settings, live: Mapping[str, Any] | None) -> str:
    """A volume never shrinks: the larger of what this service wants and what is there."""
    wanted = service.cache.size or settings.cache_size
    if live is None:
        return wanted
    there = str(live["spec"]["resources"]["requests"]["storage"])
    return wanted if quantity(wanted) > quantity(there) else there


def _storage_class(service: InferenceService, settings: Settings, live: Mapping[str, Any] | None) -> str:
    """The class is immutable: of a live claim it is kept as it was applied, whatever the setting says by
    now.
    """
    if service.cache.storage_class_name or live is None:
        return service.cache.storage_class_name or settings.cache_storage_class
    return str(live["spec"]["storageClassName"]) if _sets_storage_class(live) else ""


def _sets_storage_class(live: Mapping[str, Any]) -> bool:
    """Whether the class of a live claim is as we applied it."""
    return any(
        entry["manager"] == FIELD_MANAGER and "f:storageClassName" in entry["fieldsV1"].get("f:spec", {})
        for entry in live["metadata"].get("managedFields") or ()
    )


def prefetch_job(
    service: InferenceService,
    settings: Settings,
    volume_uid: str,
    attempt: int,
    *,
    repair: bool = False,
    begun: datetime | None = None,
) -> Manifest:
    """The Job that resolves, downloads, verifies and publishes the model. `attempt` counts from 1; `begun` is noted."""
    source = source_id(service, volume_uid)
    job = child(service, JOB, f"{service.name}-fetch-{source}-{attempt}", "fetch")
    tags = {CACHE_LABEL: cache_key(service), SOURCE_LABEL: source, ATTEMPT_LABEL: str(attempt)}
    job["metadata"]["labels"] |= tags
    arguments = _fetch_arguments(service, settings, repair=repair)
    template = fetch_pod(service, settings, _filled(service, settings, source), arguments)
    job["metadata"]["annotations"] = {TEMPLATE_KEY: template_key(template)}
    job["metadata"]["annotations"] |= {BEGUN: begun.isoformat(timespec="seconds")} if begun is not None else {}
    job["spec"] = fetch_job_spec(service, job["metadata"]["labels"], template)
    return stamped(job)


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
                    "onExitCodes": {"containerName": "fetch", "operator": "In", "values": [EXIT_PERMANENT]},
                },
                # A node that drains or dies says nothing about the source.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": job_labels(labels) | identity_labels(service)}, "spec": template},
    }


def identity_labels(service: InferenceService) -> dict[str, str]:
    """What Azure's webhook looks for; the clouds' others look at the ServiceAccount alone."""
    return {AZURE_IDENTITY: "true"} if service.model.scheme == "az" and service.model.service_account else {}


def is_repair(job: Mapping[str, Any]) -> bool:
    """Whether a prefetch Job hashes what is published and fetches again what differs."""
    return "--repair" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def models_volume(service: InferenceService) -> dict[str, Any]:
    """The pods' volume with the model. A claim of weights that are served where they lie is never written to."""
    source = {"claimName": claim_name(service)} | ({"readOnly": True} if service.in_place else {})
    return {"name": "models", "persistentVolumeClaim": source}


def in_place_arguments(service: InferenceService) -> list[str]:
    """What `stoker fetch` is told of weights that lie on the source claim."""
    claim = service.model.source_claim
    uri = f"file://{pod.MODELS}/{claim[1] if claim else ''}".rstrip("/")
    return ["--in-place", "--uri", uri, *select_arguments(service)]


def select_arguments(service: InferenceService) -> list[str]:
    """Which of the source's files are meant, and what they must be."""
    model, arguments = service.model, []
    for flag, patterns in (("--allow", model.allow), ("--ignore", model.ignore)):
        for pattern in patterns:
            arguments += [flag, pattern]
    for name, digest in model.sha256:
        arguments += ["--sha256", f"{name}={digest}"]
    return arguments


def engine_volume(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    """The volume of an engine's pod, with the model in it or about to be."""
    if service.cache.mode == "Node":
        return copies.reader_volume(service, settings, model)
    return models_volume(service) if service.cache.has_volume else copies.own_folder(copies.room(model))


def _filled(service: InferenceService, settings: Settings, source: str) -> dict[str, Any]:
    """The volume that a prefetch fills."""
    if service.cache.mode == "Node":
        return copies.filler_volume(service, settings, source, copies.first_room(service, settings))
    return (
        models_volume(service) if service.cache.has_volume else copies.own_folder(copies.first_room(service, settings))
    )


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


def fetch_container(service: InferenceService, settings: Settings, arguments: list[str]) -> dict[str, Any]:
    """A container that runs `stoker` with `arguments`; its pod has the volumes of model, source and /tmp."""
    mounts = [pod.models_mount(read_only=service.in_place), {"name": "tmp", "mountPath": "/tmp"}]
    return {
        "name": "fetch",
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


def identity(service: InferenceService) -> dict[str, Any]:
    """The ServiceAccount that may ask the source, for a pod's spec; the service's own where the spec names none."""
    return {"serviceAccountName": service.model.service_account} if service.model.service_account else {}


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


def _fetch_arguments(service: InferenceService, settings: Settings, *, repair: bool) -> list[str]:
    model = service.model
    report = ["--progress-port", str(PROGRESS_PORT), "--termination-log", pod.TERMINATION_LOG]
    if service.in_place:
        return ["fetch", *in_place_arguments(service), "--root", pod.MODELS, *report]
    arguments = [*_source_arguments(service, settings, model.revision), *(["--repair"] if repair else [])]
    if not service.cache.has_volume:
        arguments += ["--max-bytes", str(copies.first_room_bytes(service, settings))]
    return [*arguments, *report]


def again_arguments(service: InferenceService, settings: Settings, known: FetchedModel) -> list[str]:
    """What `stoker fetch` is told that brings once more, elsewhere, what is known by its digest."""
    commits = service.model.scheme in ("hf", "modelscope")
    revision = known.resolved_revision if commits else service.model.revision
    arguments = _source_arguments(service, settings, revision)
    return [*arguments, "--digest", known.digest, "--termination-log", pod.TERMINATION_LOG]


def _source_arguments(service: InferenceService, settings: Settings, revision: str) -> list[str]:
    model, uri = service.model, service.model.uri
    if model.source_claim is not None:
        uri = f"file:///source/{model.source_claim[1]}".rstrip("/")
    arguments = ["fetch", "--uri", uri, "--revision", revision, "--dest", pod.MODELS]
    arguments += endpoint_arguments(service, settings)
    if model.secret_ref is not None and model.scheme == "https":
        arguments.append("--send-token")
    return [*arguments, *select_arguments(service)]


def endpoint_arguments(service: InferenceService, settings: Settings) -> list[str]:
    """Which server is asked in the place of the URI's own."""
    endpoint = service.model.endpoint or (settings.hub_endpoint if service.model.scheme == "hf" else "")
    return ["--endpoint", endpoint] if endpoint else []
