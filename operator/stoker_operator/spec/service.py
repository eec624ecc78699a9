"""The typed InferenceService, and the only reader of raw InferenceService dicts and of a prefetch Job's
result.

Invariants: everything is frozen; `parse` fills in the CRD's defaults and repeats its rules, so a manifest
means the same with and without an API server (`stoker up`); an unknown field is a problem that names the
nearest known one.
Knows nothing of the children an InferenceService gets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker_operator.spec import engine_guard
from stoker_operator.spec.adapters import adapter_problems
from stoker_operator.spec.canary import Canary, read_canary
from stoker_operator.spec.endpoint import (
    Endpoint,
    Observability,
    kv_events_problems,
    never_wakes_problems,
    read_endpoint,
    read_observability,
)
from stoker_operator.spec.follow import Followed, follow_problems, read_followed
from stoker_operator.spec.lately import Lately
from stoker_operator.spec.later import name_later, split_unknown
from stoker_operator.spec.model import HUBS, Model, read_model
from stoker_operator.spec.operations import (
    Autoscaling,
    Disruption,
    Drain,
    RolloutPolicy,
    autoscaling_problems,
    read_autoscaling,
    read_disruption,
    read_drain,
    read_rollout,
)
from stoker_operator.spec.pod_template import PodTemplate, read_pod_template
from stoker_operator.spec.pods import (
    Cache,
    Parallelism,
    Placement,
    Resources,
    cache_problems,
    parallelism_problems,
    read_cache,
    read_parallelism,
    read_placement,
    read_resources,
)
from stoker_operator.spec.quantity import quantity
from stoker_operator.spec.reader import Reader
from stoker_operator.spec.runtime import Runtime, read_runtime
from stoker_operator.spec.weights import WeightReport, read_weights, weights_status

GROUP = "stoker.dev"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
# By this annotation people ask a service to wake or to sleep; see plan/sleep/wish.py.
WISH = f"{GROUP}/wish"
# What a person asks of a canary: "promote NAME" or "abort NAME", which names this trial of it.
CANARY_WISH = f"{GROUP}/canary"
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_MAX = 40
# The namespace's own ServiceAccount and Service, and the Service that scrapers of another service use.
RESERVED_NAME_PATTERN = r"^(default|kubernetes)$|-metrics$"
# The parts of a spec that a pod template is made of; the rest says how many pods there are and who reaches them.
SHAPING = ("model", "runtime", "parallelism", "resources", "placement", "cache", "podTemplate", "drain")


class SpecError(ValueError):
    """A manifest that cannot be used. `problems` holds one sentence a field: "spec.model.uri: …"."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class InferenceService:
    """One InferenceService as the operator sees it. `replicas` None: nobody asked, and another writer may.

    `unknown`: the fields that a newer CRD has and this program does not know. `written`: the parts of the spec that
    shape pods, as they stand in the object. `wish` and `canary_wish`: what the annotations WISH and CANARY_WISH say,
    "" = nothing.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    deleting: bool
    suspend: bool
    replicas: int | None
    model: Model
    runtime: Runtime
    resources: Resources
    placement: Placement
    cache: Cache
    drain: Drain
    disruption: Disruption = field(default_factory=Disruption)
    pod_template: PodTemplate = field(default_factory=PodTemplate)
    parallelism: Parallelism = field(default_factory=Parallelism)
    autoscaling: Autoscaling | None = None
    rollout: RolloutPolicy = field(default_factory=RolloutPolicy)
    endpoint: Endpoint = field(default_factory=Endpoint)
    observability: Observability = field(default_factory=Observability)
    status: Mapping[str, Any] = field(default_factory=dict)
    followed: Followed = field(default_factory=Followed)
    unknown: tuple[str, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict, compare=False)
    wish: str = ""
    canary: Canary | None = None
    canary_wish: str = ""

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names under which clients ask for the model; the object's own by default."""
        return self.model.served_names or (self.name,)

    def at(self, commit: str) -> InferenceService:
        """The same, serving `commit` in place of the revision that its spec names; "" = that revision itself."""
        revision = commit or self.model.asked
        return self if revision == self.model.revision else replace(self, model=replace(self.model, revision=revision))

    @property
    def pod_ranks(self) -> int:
        """Processes of its engines that compute in one pod."""
        return self.parallelism.all_ranks // self.resources.nodes

    @property
    def as_canary(self) -> InferenceService:
        """The same service with its canary in the place of what is stable; itself where it has none."""
        if self.canary is None:
            return self
        found = replace(self, written={**self.written, **self.canary.written})
        if self.canary.runtime is not None:
            found = replace(found, runtime=self.canary.runtime)
        if self.canary.model is None:
            return found
        followed = read_followed(self.status, self.canary.model.follows)
        return replace(found, model=self.canary.model, followed=followed).at(followed.commit)

    @property
    def in_place(self) -> bool:
        """Whether the weights are served from the claim that spec.model.uri names, and copied nowhere. A bundle is
        unpacked.
        """
        bundle = self.model.uri.endswith(".tar")
        return self.model.source_claim is not None and self.cache.mode == "Auto" and not bundle


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A published model. `path` and `serve` are relative to the cache volume's root; bytes are bytes.

    `layers`, `kv_heads`, `head_dim`, `max_context` are 0 when the source does not tell, and so is `lora_line`, the
    values that one rank of an adapter takes. `window_layers` look back `window` tokens, beside others that see all.
    `state_bytes`: what the states of one sequence take, in layers that have one. `weights` is None where the prefetch,
    of a version before, reported none.
    """

    resolved_revision: str
    digest: str
    bytes: int
    path: str
    serve: str
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    max_context: int = 0
    lora_line: int = 0
    window_layers: int = 0
    window: int = 0
    state_bytes: int = 0
    weights: WeightReport | None = None


# Numbers of a shape by their keys in a report, and in the status.
_SHAPE = {
    "layers": "layers", "kvHeads": "kv_heads", "headDim": "head_dim", "maxContext": "max_context",
    "loraLine": "lora_line", "windowLayers": "window_layers", "window": "window", "stateBytes": "state_bytes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FetchFailure:
    """Why a prefetch or a verification failed, in the words of the process that failed."""

    reason: str
    message: str


def parse(raw: Mapping[str, Any], *, tolerate_unknown: bool = False) -> InferenceService:
    """The typed service. Raises SpecError listing every problem, each with its field.

    `tolerate_unknown`: fields that nobody here knows are named in `unknown` instead. The API server drops what its CRD
    does not know, so such a field means that the CRD is newer than this program.
    """
    service = _LATELY.read(raw, tolerate_unknown)
    status = Reader(raw, "", []).mapping("status").raw
    followed = read_followed(status, service.model.follows)
    return replace(service.at(followed.commit), status=status, followed=followed)


def _read(raw: Mapping[str, Any], tolerate_unknown: bool) -> InferenceService:
    """The typed service, as its spec alone has it. Raises SpecError."""
    problems: list[str] = []
    reader = Reader(raw, "", problems)
    meta = reader.mapping("metadata")
    api, kind = reader.text("apiVersion"), reader.text("kind")
    if (api, kind) != (f"{GROUP}/{VERSION}", KIND):
        problems.append(f"apiVersion and kind are {api!r} and {kind!r}; they must be {GROUP}/{VERSION} and {KIND}")
    name = meta.text("name", pattern=NAME_PATTERN, longest=NAME_MAX, required=True)
    meta.refuse("name", RESERVED_NAME_PATTERN, "Kubernetes, or another service, has an object of that name")
    spec = reader.mapping("spec", required=True)
    model, runtime = read_model(spec.mapping("model", required=True)), read_runtime(spec.mapping("runtime"))
    canary = read_canary(spec.mapping("canary"), spec.raw, model, runtime) if "canary" in spec.raw else None
    notes = meta.text_map("annotations", most=10000, longest=1 << 18)
    service = InferenceService(
        name=name,
        namespace=meta.text("namespace", default="default"),
        uid=meta.text("uid"),
        generation=meta.integer("generation", default=1),
        deleting="deletionTimestamp" in meta.raw,
        suspend=spec.boolean("suspend"),
        replicas=spec.integer("replicas", least=0, most=1000) if "replicas" in spec.raw else None,
        model=model,
        runtime=runtime,
        resources=read_resources(spec.mapping("resources", required=True)),
        parallelism=read_parallelism(spec.mapping("parallelism")),
        placement=read_placement(spec.mapping("placement")),
        cache=read_cache(spec.mapping("cache")),
        drain=read_drain(spec.mapping("drain")),
        disruption=read_disruption(spec.mapping("disruption")),
        pod_template=read_pod_template(spec.mapping("podTemplate")),
        autoscaling=read_autoscaling(spec.mapping("autoscaling")) if "autoscaling" in spec.raw else None,
        rollout=read_rollout(spec.mapping("rollout")),
        endpoint=read_endpoint(spec.mapping("endpoint")),
        observability=read_observability(spec.mapping("observability")),
        status=reader.mapping("status").raw,
        written={part: spec.raw[part] for part in SHAPING if part in spec.raw},
        wish=notes.get(WISH, ""),
        canary=canary,
        canary_wish=notes.get(CANARY_WISH, ""),
    )
    spec.finish()
    if tolerate_unknown:
        unknown, problems = split_unknown(problems)
        service = replace(service, unknown=unknown)
    else:
        problems = name_later(raw, problems)
    if not problems:
        problems.extend(_cross_field_problems(service))
        problems.extend(_canary_problems(service, problems))
    if problems:
        raise SpecError(problems)
    return replace(service, status={})


_LATELY = Lately(_read)


def _cross_field_problems(service: InferenceService) -> list[str]:
    """The CRD's CEL rules that look at more than one field, in the same words."""
    model, resources = service.model, service.resources
    found = []
    if model.secret_ref and not (model.in_store or model.scheme in (*HUBS, "https", "oci")):
        found.append("spec.model.secretRef: only hubs, https://, oci:// and object stores take a token or keys")
    if model.secret_ref and (model.in_store or model.scheme == "oci") and model.secret_ref.key != "token":
        found.append("spec.model.secretRef.key: the Secret of a store or a registry is taken whole; leave it out")
    if model.service_account and not model.in_store:
        found.append("spec.model.serviceAccountName: only object stores know identities")
    if model.update_policy == "Follow" and service.cache.mode in ("Node", "None"):
        found.append("spec.model.updatePolicy: Follow needs a cache volume or an image, cache.mode Auto, PVC or Image")
    if model.service_account and service.cache.mode == "None":
        found.append("spec.model.serviceAccountName: with cache.mode None pods fetch, and they have no identity")
    if model.endpoint and not (model.in_store or model.scheme in (*HUBS, "oci")):
        found.append("spec.model.endpoint: only hubs, oci:// and object stores have an endpoint")
    if model.revision != "main" and model.scheme not in HUBS:
        found.append("spec.model.revision: only hf:// and modelscope:// sources have revisions")
    if model.adapters is not None:
        found.extend(adapter_problems(model.adapters, service.served_names, volume=_shared_volume(service)))
    if (model.allow or model.ignore) and model.scheme == "https":
        found.append("spec.model.files: an https:// source is one file")
    if service.cache.mode == "Image" and (model.allow or model.ignore or model.sha256):
        found.append("spec.model: with cache.mode Image the image is mounted whole; leave files and sha256 out")
    if resources.gpu_products and not resources.on_gpu:
        found.append("spec.resources.gpuProducts: needs gpus of at least 1, or claims")
    if resources.memory and quantity(service.runtime.shm_size) >= quantity(resources.memory):
        found.append("spec.runtime.shmSize: must be less than resources.memory, which it counts against")
    found.extend(follow_problems(model.update_policy, model.uri, model.revision, service.cache.existing_claim))
    if service.observability.otlp_endpoint and engine_guard.says("otlp-traces-endpoint", service.runtime.args):
        found.append("spec.observability.otlpEndpoint: runtime.args has --otlp-traces-endpoint too; give one of them")
    found.extend(parallelism_problems(service.parallelism, resources))
    if service.parallelism.data > 1:
        found.extend(_several_engines_problems(service))
    if resources.spans_nodes and service.cache.access_mode == "ReadWriteOncePod":
        found.append("spec.cache.pvc.accessMode: ReadWriteOncePod has no room for a second node's pod")
    found.extend(cache_problems(service.cache, model.scheme))
    if service.autoscaling is not None:
        found.extend(autoscaling_problems(service.autoscaling, service.replicas))
        if service.autoscaling.scale_to_zero is not None:
            found.extend(never_wakes_problems(service.endpoint))
    if service.endpoint.kv_events is not None:
        found.extend(kv_events_problems(service.runtime.args, service.runtime.env, service.parallelism.data))
    return found


def _several_engines_problems(service: InferenceService) -> Iterator[str]:
    """What one engine a pod can do alone."""
    if service.model.adapters is not None:
        yield "spec.model.adapters: are served by one engine a pod; they need parallelism.data of 1"
    if engine_guard.says("kv-events-config", service.runtime.args):
        yield "spec.runtime.args: --kv-events-config tells of one engine's cache; it needs parallelism.data of 1"


def _shared_volume(service: InferenceService) -> bool:
    """Whether a Job can write to the volume of pods that run."""
    cache = service.cache
    return cache.has_volume and not service.in_place and cache.access_mode != "ReadWriteOncePod"


def _canary_problems(service: InferenceService, known: list[str]) -> list[str]:
    """What of those rules the canary breaks."""
    if service.canary is None:
        return []
    if not service.cache.has_volume:
        return ["spec.canary: needs a cache volume, cache.mode Auto or PVC"]
    if service.resources.spans_nodes:
        return ["spec.canary: not beside resources.nodes of more than 1; change the spec, which goes group by group"]
    if service.canary.model is not None and service.model.adapters is not None:
        text = "not beside spec.model.adapters, which lie on the volume of the stable model; canary.runtime can be"
        return [f"spec.canary.model: {text}"]
    found = _cross_field_problems(service.as_canary)
    parts = re.compile(r"^spec\.(model|runtime)\b")
    return [parts.sub(r"spec.canary.\1", text) for text in found if text not in known]


def parse_fetch_result(text: str) -> FetchedModel | FetchFailure | None:
    """What a prefetch or verify container wrote to its termination log; None when it is no such report."""
    try:
        raw = json.loads(text)
    except ValueError:
        return None
    if not isinstance(raw, dict):
        return None
    if "reason" in raw:
        return FetchFailure(str(raw["reason"]), str(raw.get("message", "")))
    return _fetched(raw)


def remembered_model(status: Mapping[str, Any]) -> FetchedModel | None:
    """The published model that the status of an earlier reconcile holds; None when there is none."""
    raw = status.get("model")
    return _fetched(raw) if isinstance(raw, Mapping) else None


def model_status(model: FetchedModel, source: str) -> dict[str, Any]:
    """What the status remembers of a published model; `source` names it and its volume."""
    shape: dict[str, Any] = {key: getattr(model, field) for key, field in _SHAPE.items() if getattr(model, field)}
    shape |= {"weights": weights_status(model.weights)} if model.weights is not None else {}
    return {
        "source": source,
        "resolvedRevision": model.resolved_revision,
        "shortRevision": model.resolved_revision[:7],
        "digest": model.digest,
        "bytes": model.bytes,
        "path": model.path,
        "serve": model.serve,
        "shape": shape,
    }


def _fetched(raw: Mapping[str, Any]) -> FetchedModel | None:
    texts = [raw.get(key) for key in ("resolvedRevision", "digest", "path", "serve")]
    size = raw.get("bytes")
    if not all(isinstance(text, str) for text in texts) or not isinstance(size, int):
        return None
    shape = raw.get("shape")
    shape = shape if isinstance(shape, Mapping) else {}
    numbers = {field: shape.get(key) for key, field in _SHAPE.items()}
    known: dict[str, Any] = {field: number for field, number in numbers.items() if isinstance(number, int)}
    revision, digest, path, serve = (str(text) for text in texts)
    return FetchedModel(revision, digest, size, path, serve, **known, weights=read_weights(shape.get("weights")))
