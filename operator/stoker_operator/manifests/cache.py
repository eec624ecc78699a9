"""The model cache: a volume shared by every service of a namespace that serves the same files, and the
prefetch Job. Where no volume is shared (cache.mode Node and None) the Job fetches once, and finds out what it is; of an
image that pods mount (Image) it asks the registry, and fetches nothing.

Invariants: the volume's name depends only on what it holds and where, so two services with the same source
share it; a Job's name depends on the source, the volume's identity and the attempt, so a finished Job is
never run again and a volume that was replaced is filled again.
A claim that nobody wants retained is owned by its users, so Kubernetes ends it with the last of them.
Knows nothing of how a source is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stoker_operator.manifests import copies, pod
from stoker_operator.manifests.fetching.asking import (
    FETCH,
    JOB,
    PROGRESS_PORT,
    fetch_job_spec,
    fetch_pod,
    in_place_arguments,
    resolving_arguments,
    resolving_pod,
    source_arguments,
)
from stoker_operator.manifests.identity import (
    ATTEMPT_LABEL,
    BEGUN,
    CACHE_LABEL,
    COMPONENT,
    FIELD_MANAGER,
    INSTANCE,
    MANAGED_BY,
    SOURCE_LABEL,
    Manifest,
    cache_key,
    child,
    source_id,
    stamped,
)
from stoker_operator.manifests.revision import TEMPLATE_KEY, template_key
from stoker_operator.settings import Settings
from stoker_operator.spec.quantity import quantity
from stoker_operator.spec.service import GROUP, KIND, VERSION, FetchedModel, InferenceService

# On a cache claim, one annotation a user: its uid and the seconds for which it wants the claim retained.
USER_PREFIX = f"user.{GROUP}/"
CLAIM = ("v1", "PersistentVolumeClaim")


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


def services_of(meta: Mapping[str, Any]) -> set[str]:
    """The names of the services that an object of these metadata concerns: by its owner references, by its label where
    it has another owner, and by the users that a cache claim names.
    """
    names = {key.removeprefix(USER_PREFIX) for key in meta.get("annotations") or () if key.startswith(USER_PREFIX)}
    names |= {item["name"] for item in meta.get("ownerReferences") or () if item["kind"] == KIND}
    instance = (meta.get("labels") or {}).get(INSTANCE)
    return names | ({instance} if instance else set())


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
    template = _prefetch_pod(service, settings, source, repair=repair)
    job["metadata"]["annotations"] = {TEMPLATE_KEY: template_key(template)}
    job["metadata"]["annotations"] |= {BEGUN: begun.isoformat(timespec="seconds")} if begun is not None else {}
    job["spec"] = fetch_job_spec(service, job["metadata"]["labels"], template)
    return stamped(job)


def _prefetch_pod(service: InferenceService, settings: Settings, source: str, *, repair: bool) -> dict[str, Any]:
    if service.cache.mode == "Image":
        return resolving_pod(service, settings, FETCH, resolving_arguments(service, settings, service.model.revision))
    arguments = _fetch_arguments(service, settings, repair=repair)
    return fetch_pod(service, settings, _filled(service, settings, source), arguments)


def is_repair(job: Mapping[str, Any]) -> bool:
    """Whether a prefetch Job hashes what is published and fetches again what differs."""
    return "--repair" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def models_volume(service: InferenceService) -> dict[str, Any]:
    """The pods' volume with the model. A claim of weights that are served where they lie is never written to."""
    source = {"claimName": claim_name(service)} | ({"readOnly": True} if service.in_place else {})
    return {"name": "models", "persistentVolumeClaim": source}


def engine_volume(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    """The volume of an engine's pod, with the model in it or about to be."""
    if service.cache.mode == "Node":
        return copies.reader_volume(service, settings, model)
    if service.cache.mode == "Image":
        return copies.image_volume(service, model)
    return models_volume(service) if service.cache.has_volume else copies.own_folder(copies.room(model))


def served_path(service: InferenceService, model: FetchedModel) -> str:
    """Where the engine's container has what it serves."""
    return f"{pod.MODELS}/{service.cache.image_path or model.serve}".rstrip("/")


def _filled(service: InferenceService, settings: Settings, source: str) -> dict[str, Any]:
    """The volume that a prefetch fills."""
    if service.cache.mode == "Node":
        return copies.filler_volume(service, settings, source, copies.first_room(service, settings))
    return (
        models_volume(service) if service.cache.has_volume else copies.own_folder(copies.first_room(service, settings))
    )


def _fetch_arguments(service: InferenceService, settings: Settings, *, repair: bool) -> list[str]:
    model = service.model
    report = ["--progress-port", str(PROGRESS_PORT), "--termination-log", pod.TERMINATION_LOG]
    if service.in_place:
        return ["fetch", *in_place_arguments(service), "--root", pod.MODELS, *report]
    arguments = [*source_arguments(service, settings, model.revision), *(["--repair"] if repair else [])]
    if not service.cache.has_volume:
        arguments += ["--max-bytes", str(copies.first_room_bytes(service, settings))]
    return [*arguments, *report]
