"""spec.podTemplate: what pods carry besides: labels, annotations, containers beside the engine's, volumes, security.

Invariants: as in service.py: the CRD's rules. What is merged never lowers a pod below the restricted Pod Security
profile, and never changes what the operator itself says of its containers and volumes.
Knows nothing of the pods that it is merged into.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_operator.spec.endpoint import DNS_NAME_PATTERN
from stoker_operator.spec.reader import Reader

# Labels that selectors, the work queue and the chart's own pods go by.
PROTECTED_LABEL_PATTERN = r"^(app\.kubernetes\.io/|stoker\.dev/|pod-template-hash$)"
LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
OUR_CONTAINERS = ("engine", "verify", "fetch")
OUR_VOLUMES = ("models", "tmp", "shm", "api-keys", "adapter-list", "source", "pod-tls", "client-ca")
OUR_PATHS_PATTERN = r"^/(models|tmp|dev/shm|etc/stoker)(/|$)"
OUR_RESOURCES = ("cpu", "memory", "ephemeral-storage")
# What the restricted profile lets a pod mount.
VOLUME_KINDS = (
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
)  # fmt: skip
# Of the engine's own container; the rest of it is said elsewhere in the spec, or by the operator.
OF_THE_ENGINE = ("name", "volumeMounts", "resources", "securityContext")
_LISTS_OF_TEXT = ("command", "args")
_LISTS = ("env", "envFrom", "ports")
_MAPPINGS = ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle")
_MOST_ID = 2**31 - 1
RESTRICTED = "pods meet the restricted Pod Security profile, always"


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """Pull secrets are all pods', the rest the engine's pods'. Containers and volumes are as the API writes them; a
    container called `engine` is merged into the engine's.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    image_pull_secrets: tuple[str, ...] = ()
    containers: tuple[Mapping[str, Any], ...] = ()
    init_containers: tuple[Mapping[str, Any], ...] = ()
    volumes: tuple[Mapping[str, Any], ...] = ()
    security: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sidecars(self) -> tuple[Mapping[str, Any], ...]:
        """The containers beside the engine's."""
        return tuple(item for item in self.containers if item.get("name") != "engine")


def read_pod_template(r: Reader) -> PodTemplate:
    """spec.podTemplate."""
    meta, spec = r.mapping("metadata"), r.mapping("spec")
    labels = meta.text_map("labels", most=32, longest=63)
    annotations = meta.text_map("annotations", most=32, longest=4096)
    for label in labels:
        meta.refuse_key("labels", label, PROTECTED_LABEL_PATTERN, "the operator selects pods by it")
    template = PodTemplate(
        labels,
        annotations,
        tuple(_pull_secret(item) for item in _items(spec, "imagePullSecrets", 16)),
        _containers(spec, "containers"),
        _containers(spec, "initContainers"),
        _volumes(spec),
        _pod_security(spec.mapping("securityContext")),
    )
    for part in (meta, spec, r):
        part.finish()
    return template


def _items(r: Reader, key: str, most: int) -> list[Reader]:
    """A reader of each mapping in a list."""
    return [Reader(item, f"{r.path}.{key}[{at}]", r.problems) for at, item in enumerate(r.objects(key, most=most))]


def _pull_secret(item: Reader) -> str:
    name = item.text("name", pattern=DNS_NAME_PATTERN, longest=253, required=True)
    item.finish()
    return name


def _containers(spec: Reader, key: str) -> tuple[Mapping[str, Any], ...]:
    found = _items(spec, key, 8)
    names: list[str] = []
    for item in found:
        name = item.text("name", pattern=LABEL_PATTERN, longest=63, required=True)
        if name in names:
            item.problems.append(f"{item.path}.name: {name!r} is there twice")
        names.append(name)
        engine = name == "engine" and key == "containers"
        if name in OUR_CONTAINERS and not engine:
            item.problems.append(f"{item.path}.name: {name!r} is the operator's own container")
        _container(item, engine=engine, init=key == "initContainers")
    return tuple(item.raw for item in found)


def _container(item: Reader, *, engine: bool, init: bool) -> None:
    image = item.text("image", longest=512)
    for key in _LISTS_OF_TEXT:
        item.texts(key, most=64, longest=1024)
    for key in _LISTS:
        item.objects(key, most=64)
    for key in _MAPPINGS:
        item.mapping(key)
    item.text("workingDir", longest=1024)
    if "imagePullPolicy" in item.raw:
        item.choice("imagePullPolicy", ("Always", "IfNotPresent", "Never"))
    if "restartPolicy" in item.raw and init:
        item.choice("restartPolicy", ("Always",))
    _resources(item.mapping("resources"), engine=engine)
    for mount in _items(item, "volumeMounts", 32):
        _mount(mount, engine=engine)
    _container_security(item.mapping("securityContext"))
    item.finish()
    if engine and set(item.raw) - set(OF_THE_ENGINE):
        text = "of the engine's container, volumeMounts, resources and securityContext are merged"
        item.problems.append(f"{item.path}: {text}; the rest is runtime's")
    if not engine and not image:
        item.problems.append(f"{item.path}.image: is required")


def _resources(r: Reader, *, engine: bool) -> None:
    for key in ("requests", "limits"):
        part = r.mapping(key)
        for name in part.raw:
            part.quantity(name)
            if engine and name in OUR_RESOURCES:
                part.problems.append(f"{part.path}.{name}: of the engine, spec.resources says it")
        if len(part.raw) > 16:
            part.problems.append(f"{part.path}: has {len(part.raw)} entries; at most 16")
    r.finish()


def _mount(r: Reader, *, engine: bool) -> None:
    name = r.text("name", longest=63, required=True)
    r.text("mountPath", longest=1024, pattern="^/.*$", required=True)
    for key in ("subPath", "subPathExpr", "mountPropagation", "recursiveReadOnly"):
        r.text(key, longest=1024)
    read_only = r.boolean("readOnly")
    if name in OUR_VOLUMES and not (name == "models" and read_only and not engine):
        r.problems.append(f"{r.path}.name: {name!r} is the operator's own volume; another container may read models")
    if engine:
        r.refuse("mountPath", OUR_PATHS_PATTERN, "the operator mounts it")
    r.finish()


def _volumes(spec: Reader) -> tuple[Mapping[str, Any], ...]:
    found = _items(spec, "volumes", 16)
    for item in found:
        name = item.text("name", pattern=LABEL_PATTERN, longest=63, required=True)
        if name in OUR_VOLUMES:
            item.problems.append(f"{item.path}.name: {name!r} is the operator's own volume")
        kinds = [kind for kind in VOLUME_KINDS if kind in item.raw]
        for kind in kinds:
            item.mapping(kind)
        if len(kinds) != 1:
            item.problems.append(f"{item.path}: must be one of {', '.join(VOLUME_KINDS)}; {RESTRICTED}")
        else:
            item.finish()
    return tuple(item.raw for item in found)


def _only(r: Reader, key: str, value: bool) -> None:
    """A switch that the restricted profile fixes."""
    if key in r.raw and r.boolean(key) != value:
        r.problems.append(f"{r.path}.{key}: must be {str(value).lower()}: {RESTRICTED}")
    elif key in r.raw:
        r.boolean(key)


def _user(r: Reader, key: str) -> None:
    if key in r.raw:
        r.integer(key, least=1, most=_MOST_ID)


def _seccomp(r: Reader) -> None:
    if "seccompProfile" in r.raw:
        profile = r.mapping("seccompProfile")
        profile.choice("type", ("RuntimeDefault", "Localhost"))
        profile.text("localhostProfile", longest=1024)
        profile.finish()


def _container_security(r: Reader) -> None:
    for key in ("runAsUser", "runAsGroup"):
        _user(r, key)
    _only(r, "runAsNonRoot", True)
    _only(r, "allowPrivilegeEscalation", False)
    _only(r, "privileged", False)
    r.boolean("readOnlyRootFilesystem")
    _seccomp(r)
    capabilities = r.mapping("capabilities")
    for index, name in enumerate(capabilities.texts("add", most=1, longest=64)):
        if name != "NET_BIND_SERVICE":
            where = f"{capabilities.path}.add[{index}]"
            capabilities.problems.append(f"{where}: must be NET_BIND_SERVICE: {RESTRICTED}")
    capabilities.texts("drop", most=64, longest=64)
    capabilities.finish()
    r.finish()


def _pod_security(r: Reader) -> Mapping[str, Any]:
    for key in ("runAsUser", "runAsGroup", "fsGroup"):
        _user(r, key)
    r.integers("supplementalGroups", least=1, most=_MOST_ID, longest=16)
    if "fsGroupChangePolicy" in r.raw:
        r.choice("fsGroupChangePolicy", ("OnRootMismatch", "Always"))
    _only(r, "runAsNonRoot", True)
    _seccomp(r)
    r.finish()
    return r.raw
