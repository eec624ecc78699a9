"""The parts of the spec that say what pods get and where they run: resources, placement, cache.

Invariants: as in service.py: frozen, with the CRD's defaults and rules.
Knows nothing of the children an InferenceService gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_operator.spec.endpoint import DNS_NAME_PATTERN
from stoker_operator.spec.reader import Reader

_SOFT: Mapping[str, Any] = {"whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 1}
SPREAD: tuple[Mapping[str, Any], ...] = tuple(
    {"topologyKey": key, **_SOFT} for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
)
"""Pods go to other zones and nodes where they can, and beside each other where they cannot."""
MOST_RANKS = 16
LONGEST_RETAIN_SECONDS = 365 * 86400
LONGEST_VERIFY_SECONDS = 365 * 86400
# Relative, and nothing in it begins with a dot.
IMAGE_PATH_PATTERN = r"^([A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*)?$"
CLAIM_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_CLAIM_SOURCES = ("resourceClaimTemplateName", "resourceClaimName")


@dataclass(frozen=True, slots=True)
class Resources:
    """Per pod. Quantities are Kubernetes strings, "" = unset. `claims` (dynamic resource allocation) stand in place of
    `gpus`, which is 0 then. `nodes`: so many pods, each on a node of its own, are one replica.
    """

    gpus: int
    nodes: int = 1
    claims: tuple[Mapping[str, str], ...] = ()
    gpu_resource: str = "nvidia.com/gpu"
    gpu_products: tuple[str, ...] = ()
    cpu: str = ""
    memory: str = ""
    ephemeral_storage: str = ""
    fit_check: str = "Enforce"

    @property
    def on_gpu(self) -> bool:
        """Whether a pod has a GPU, by whatever way."""
        return bool(self.gpus or self.claims)

    @property
    def spans_nodes(self) -> bool:
        """Whether a replica is a group of pods, and no pod alone."""
        return self.nodes > 1


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How a replica's GPUs share the model: `tensor` of them each layer, `pipeline` stages of those the layers.

    `expert`: they share a mixture's experts whole, and not each of them. `data`: so many engines, each with the whole
    model on GPUs of its own, stand behind one address in a pod.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False
    data: int = 1

    @property
    def ranks(self) -> int:
        """Processes of one engine that compute, one a GPU."""
        return self.tensor * self.pipeline

    @property
    def all_ranks(self) -> int:
        """Those of all engines of a replica."""
        return self.ranks * self.data


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pods may run; the prefetch Job goes the same way, since a volume may be bound to a node.

    `topology_spread` and `queue_name` (of Kueue) are the engine's pods' alone; they are spread by default.
    """

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    affinity: Mapping[str, Any] = field(default_factory=dict)
    topology_spread: tuple[Mapping[str, Any], ...] = SPREAD
    runtime_class_name: str = ""
    priority_class_name: str = ""
    scheduler_name: str = ""
    queue_name: str = ""


@dataclass(frozen=True, slots=True)
class Cache:
    """The volume that holds the weights. "" = the operator's setting.

    `mode`: Auto serves a pvc:// model where it lies and everything else from a cache volume; PVC always has one. Node
    keeps a copy on each node's own disk (`prewarm`: on every node that pods may run on, before they do), Image mounts
    an image of a registry (`image_path`: where in it the model is, "" = as it says itself), None fetches into each pod.
    `existing_claim` is a claim of the user's to publish on. `retain`: seconds that a volume outlives its last use.
    `verify_every`: seconds between two scheduled verifications, where `verify` is Scheduled.
    """

    storage_class_name: str = ""
    size: str = ""
    access_mode: str = "ReadWriteOnce"
    verify: str = "OnDownload"
    mode: str = "Auto"
    existing_claim: str = ""
    retain: int = 0
    verify_every: int = 86400
    prewarm: bool = False
    image_path: str = ""
    pull_policy: str = "IfNotPresent"

    @property
    def has_volume(self) -> bool:
        """Whether the weights lie on a claim that all pods share."""
        return self.mode in ("Auto", "PVC")


def read_resources(r: Reader) -> Resources:
    """spec.resources."""
    resources = Resources(
        gpus=r.integer("gpus", least=0, most=MOST_RANKS, required="claims" not in r.raw),
        nodes=r.integer("nodes", default=1, least=1, most=MOST_RANKS),
        claims=_claims(r),
        gpu_resource=r.text(
            "gpuResource", default="nvidia.com/gpu", pattern=r"^[a-z0-9.-]+/[a-z0-9._-]+$", longest=253
        ),
        gpu_products=r.texts("gpuProducts", pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]*$", most=16, longest=63),
        cpu=r.quantity("cpu"),
        memory=r.quantity("memory"),
        ephemeral_storage=r.quantity("ephemeralStorage"),
        fit_check=r.choice("fitCheck", ("Enforce", "Warn", "Off")),
    )
    if resources.claims and "gpus" in r.raw:
        r.problems.append(f"{r.path}: give one of gpus and claims")
    r.finish()
    return resources


def _claims(r: Reader) -> tuple[Mapping[str, str], ...]:
    found: list[Mapping[str, str]] = []
    for index, entry in enumerate(r.objects("claims", most=8)):
        item = Reader(entry, f"{r.path}.claims[{index}]", r.problems)
        name = item.text("name", pattern=CLAIM_NAME_PATTERN, longest=63, required=True)
        for key in _CLAIM_SOURCES:
            item.text(key, pattern=DNS_NAME_PATTERN, longest=253)
        item.text("request", pattern=CLAIM_NAME_PATTERN, longest=63)
        if sum(key in entry for key in _CLAIM_SOURCES) != 1:
            r.problems.append(f"{item.path}: give one of {' and '.join(_CLAIM_SOURCES)}")
        if name in [earlier.get("name") for earlier in found]:
            r.problems.append(f"{item.path}.name: {name!r} is there twice")
        item.finish()
        found.append(item.raw)
    if "claims" in r.raw and not found:
        r.problems.append(f"{r.path}.claims: is empty; name a claim, or give gpus")
    return tuple(found)


def read_parallelism(r: Reader) -> Parallelism:
    """spec.parallelism."""
    found = Parallelism(
        tensor=r.integer("tensor", default=1, least=1, most=MOST_RANKS),
        pipeline=r.integer("pipeline", default=1, least=1, most=MOST_RANKS),
        expert=r.boolean("expert"),
        data=r.integer("data", default=1, least=1, most=MOST_RANKS),
    )
    if found.expert and found.tensor == 1:
        r.problems.append(f"{r.path}: expert needs tensor of at least 2, which share the experts")
    r.finish()
    return found


def parallelism_problems(parallelism: Parallelism, resources: Resources) -> list[str]:
    """What of the two does not go together. A claim may hold any number of GPUs; on CPUs a rank is a process."""
    if parallelism.data > 1 and resources.spans_nodes:
        text = "several engines stand in one pod only; it needs resources.nodes of 1, or replicas in its place"
        return [f"spec.parallelism.data: {text}"]
    if resources.gpus and parallelism.all_ranks != resources.gpus * resources.nodes:
        return ["spec.parallelism: tensor times pipeline times data must be resources.gpus times resources.nodes"]
    if parallelism.ranks % resources.nodes:
        return ["spec.parallelism: tensor times pipeline must be a multiple of resources.nodes"]
    if parallelism.all_ranks > MOST_RANKS:
        return [f"spec.parallelism: tensor times pipeline times data must be at most {MOST_RANKS}"]
    return []


def read_placement(r: Reader) -> Placement:
    """spec.placement. What is inside `affinity` and a spread constraint is the API server's to check."""
    tolerations = r.objects("tolerations", most=32)
    for index, entry in enumerate(tolerations):
        item = Reader(entry, f"{r.path}.tolerations[{index}]", r.problems)
        for key in ("key", "operator", "value", "effect"):
            item.text(key, longest=253)
        item.integer("tolerationSeconds")
        item.finish()
    affinity = r.mapping("affinity")
    for key in ("nodeAffinity", "podAffinity", "podAntiAffinity"):
        affinity.mapping(key)
    affinity.finish()
    placement = Placement(
        node_selector=r.text_map("nodeSelector", most=32),
        tolerations=tolerations,
        affinity=affinity.raw,
        topology_spread=_spread(r),
        runtime_class_name=r.text("runtimeClassName", pattern=f"({DNS_NAME_PATTERN})?", longest=253),
        priority_class_name=r.text("priorityClassName", pattern=f"({DNS_NAME_PATTERN})?", longest=253),
        scheduler_name=r.text("schedulerName", pattern=f"({DNS_NAME_PATTERN})?", longest=253),
        queue_name=r.text("queueName", pattern=f"({DNS_NAME_PATTERN})?", longest=63),
    )
    r.finish()
    return placement


def _spread(r: Reader) -> tuple[Mapping[str, Any], ...]:
    """The constraints; where the spec says nothing of it, the default ones; an empty list means none."""
    if "topologySpread" not in r.raw:
        r.objects("topologySpread", most=8)
        return SPREAD
    found = []
    for index, entry in enumerate(r.objects("topologySpread", most=8)):
        item = Reader(entry, f"{r.path}.topologySpread[{index}]", r.problems)
        found.append(
            {
                "topologyKey": item.text("topologyKey", longest=316, required=True),
                "whenUnsatisfiable": item.choice("whenUnsatisfiable", ("ScheduleAnyway", "DoNotSchedule")),
                "maxSkew": item.integer("maxSkew", default=1, least=1, most=1000),
            }
        )
        item.finish()
    return tuple(found)


def read_cache(r: Reader) -> Cache:
    """spec.cache."""
    pvc, image = r.mapping("pvc"), r.mapping("image")
    cache = Cache(
        storage_class_name=pvc.text("storageClassName", pattern=f"({DNS_NAME_PATTERN})?", longest=253),
        size=pvc.quantity("size"),
        access_mode=pvc.choice("accessMode", ("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod")),
        verify=r.choice("verify", ("OnDownload", "Always", "Scheduled")),
        mode=r.choice("mode", ("Auto", "PVC", "Node", "Image", "None")),
        existing_claim=pvc.text("existingClaim", pattern=DNS_NAME_PATTERN, longest=253),
        retain=r.duration("retain", 0, most=LONGEST_RETAIN_SECONDS),
        verify_every=r.duration("verifyEvery", 86400, least=60, most=LONGEST_VERIFY_SECONDS),
        prewarm=r.boolean("prewarm"),
        image_path=image.text("path", pattern=IMAGE_PATH_PATTERN, longest=512),
        pull_policy=image.choice("pullPolicy", ("IfNotPresent", "Always", "Never")),
    )
    r.problems.extend(_mode_problems(cache, r.path))
    if "verifyEvery" in r.raw and cache.verify != "Scheduled":
        r.problems.append(f"{r.path}.verifyEvery: only verify: Scheduled has an interval")
    if cache.verify == "Scheduled" and cache.access_mode == "ReadWriteOncePod":
        r.problems.append(
            f"{r.path}.verify: a volume that is ReadWriteOncePod has no room for the pod that verifies it"
        )
    if cache.existing_claim and {"storageClassName", "size"} & pvc.raw.keys():
        r.problems.append(f"{r.path}.pvc: existingClaim has its own class and size")
    if "image" in r.raw and cache.mode != "Image":
        r.problems.append(f"{r.path}.image: needs mode Image")
    for part in (pvc, image, r):
        part.finish()
    return cache


def _mode_problems(cache: Cache, path: str) -> list[str]:
    """What only a volume that pods share has."""
    found = []
    own = cache.storage_class_name or cache.existing_claim or cache.access_mode != "ReadWriteOnce"
    if not cache.has_volume and (own or cache.retain):
        found.append(f"{path}: of pvc, mode Node and None take size alone, and nothing is retained")
    if cache.mode == "Image" and (cache.size or cache.verify != "OnDownload"):
        found.append(f"{path}: mode Image takes neither pvc nor verify: nodes keep images, and check what they pull")
    elif not cache.has_volume and cache.verify == "Scheduled":
        found.append(f"{path}.verify: only a cache volume is verified on schedule")
    if cache.mode == "None" and cache.verify == "Always":
        found.append(f"{path}.verify: mode None verifies what each pod fetches; leave it out")
    if cache.prewarm and cache.mode != "Node":
        found.append(f"{path}.prewarm: needs mode Node")
    return found


def cache_problems(cache: Cache, scheme: str) -> list[str]:
    """The CRD's CEL rules about the cache that look at more than the cache."""
    found = []
    if cache.existing_claim and cache.retain:
        found.append("spec.cache.retain: a claim of yours (pvc.existingClaim) is never deleted")
    volume = (cache.existing_claim, cache.size, cache.storage_class_name)
    if scheme == "pvc" and cache.mode == "Auto" and (cache.retain or any(volume)):
        found.append(
            "spec.cache: a pvc:// model is served where it lies; pvc and retain need mode: PVC, which copies it"
        )
    if cache.mode == "Image" and scheme != "oci":
        found.append("spec.cache.mode: Image mounts an image of a registry; write model.uri as oci://registry/name:tag")
    return found
