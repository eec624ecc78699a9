"""The typed InferenceService, and the only reader of raw InferenceService dicts and of a prefetch Job's
result.

Invariants: everything is frozen; `parse` fills in the CRD's defaults and repeats its rules, so a manifest
means the same with and without an API server (`stoker up`); an unknown field is a problem that names the
nearest known one.
Knows nothing of the children an InferenceService gets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker_operator.spec import engine_guard
from stoker_operator.spec.adapters import Adapter, adapter_problems, read_adapters
from stoker_operator.spec.endpoint import (
    Endpoint,
    Observability,
    SecretRef,
    read_endpoint,
    read_observability,
    read_secret_ref,
)
from stoker_operator.spec.follow import Followed, follow_problems, follow_source, read_followed
from stoker_operator.spec.later import name_later, split_unknown
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

GROUP = "stoker.dev"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
# By this annotation people ask a service to wake or to sleep; see plan/sleep/wish.py.
WISH = f"{GROUP}/wish"
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_MAX = 40
# The namespace's own ServiceAccount and Service, and the Service that scrapers of another service use.
RESERVED_NAME_PATTERN = r"^(default|kubernetes)$|-metrics$"
URI_PATTERN = (
    r"^((hf|modelscope)://[^/ ]+/[^/ ]+(/[^ ]+\.gguf)?|(s3|gs|az)://[a-z0-9$][a-z0-9._-]+[a-z0-9](/[^ ?#]*)?"
    r"|oci://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9._-]+)+(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]+)?"
    r"|https://[^/ ]+/[^ ]+|file:///[^ ]+"
    r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^ ]*)?)$"
)
ACCOUNT_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
STORES = ("s3", "gs", "az")
HUBS = ("hf", "modelscope")
REVISION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
SERVED_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$"
# The parts of a spec that a pod template is made of; the rest says how many pods there are and who reaches them.
SHAPING = ("model", "runtime", "parallelism", "resources", "placement", "cache", "podTemplate", "drain")
# As the spec says it: as `stoker serve` does.
QUANTIZATIONS = {
    "Auto": "auto", "None": "none", "FP8": "fp8", "W4": "w4", "AWQ": "awq", "GPTQ": "gptq",
    "CompressedTensors": "compressed-tensors", "ModelOpt": "modelopt",
}  # fmt: skip
KV_CACHE_DTYPES = {"Auto": "auto", "BF16": "bfloat16", "FP16": "float16", "FP8": "fp8"}


class SpecError(ValueError):
    """A manifest that cannot be used. `problems` holds one sentence a field: "spec.model.uri: …"."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Model:
    """What to serve: the source, the revision, and the names clients use.

    `revision` is what is served: the spec's own, or a commit that it has come to since (spec/follow.py); `asked` is the
    spec's.
    `adapters` None: the spec speaks of none, and pods make no room for them.
    """

    uri: str
    revision: str = "main"
    asked: str = "main"
    update_policy: str = "Pinned"
    served_names: tuple[str, ...] = ()
    secret_ref: SecretRef | None = None
    service_account: str = ""
    endpoint: str = ""
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    sha256: tuple[tuple[str, str], ...] = ()
    quantization: str = "Auto"
    kv_cache_dtype: str = "Auto"
    adapters: tuple[Adapter, ...] | None = None

    @property
    def scheme(self) -> str:
        """hf, modelscope, s3, gs, az, oci, https, file or pvc."""
        return self.uri.partition("://")[0]

    @property
    def follows(self) -> str:
        """Names what is followed where `update_policy` is Follow; what a status remembers goes by it in any case."""
        return follow_source(self.uri, self.asked, self.endpoint)

    @property
    def in_store(self) -> bool:
        """Whether an object store has the weights."""
        return self.scheme in STORES

    @property
    def source_claim(self) -> tuple[str, str] | None:
        """(claim, path in it) of a pvc:// model, else None."""
        if self.scheme != "pvc":
            return None
        claim, _, path = self.uri.removeprefix("pvc://").partition("/")
        return claim, path


@dataclass(frozen=True, slots=True)
class InferenceService:
    """One InferenceService as the operator sees it. `replicas` None: nobody asked, and another writer may.

    `unknown`: the fields that a newer CRD has and this program does not know. `written`: the parts of the spec that
    shape pods, as they stand in the object. `wish`: what the annotation WISH says, "" = nothing.
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

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names under which clients ask for the model; the object's own by default."""
        return self.model.served_names or (self.name,)

    def at(self, commit: str) -> InferenceService:
        """The same, serving `commit` in place of the revision that its spec names; "" = that revision itself."""
        return replace(self, model=replace(self.model, revision=commit or self.model.asked))

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
    values that one rank of an adapter takes.
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
    problems: list[str] = []
    reader = Reader(raw, "", problems)
    meta = reader.mapping("metadata")
    api, kind = reader.text("apiVersion"), reader.text("kind")
    if (api, kind) != (f"{GROUP}/{VERSION}", KIND):
        problems.append(f"apiVersion and kind are {api!r} and {kind!r}; they must be {GROUP}/{VERSION} and {KIND}")
    name = meta.text("name", pattern=NAME_PATTERN, longest=NAME_MAX, required=True)
    meta.refuse("name", RESERVED_NAME_PATTERN, "Kubernetes, or another service, has an object of that name")
    spec = reader.mapping("spec", required=True)
    service = InferenceService(
        name=name,
        namespace=meta.text("namespace", default="default"),
        uid=meta.text("uid"),
        generation=meta.integer("generation", default=1),
        deleting="deletionTimestamp" in meta.raw,
        suspend=spec.boolean("suspend"),
        replicas=spec.integer("replicas", least=0, most=1000) if "replicas" in spec.raw else None,
        model=_model(spec.mapping("model", required=True)),
        runtime=read_runtime(spec.mapping("runtime")),
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
        wish=meta.text_map("annotations", most=10000, longest=1 << 18).get(WISH, ""),
    )
    spec.finish()
    if tolerate_unknown:
        unknown, problems = split_unknown(problems)
        service = replace(service, unknown=unknown)
    else:
        problems = name_later(raw, problems)
    if not problems:
        problems.extend(_cross_field_problems(service))
    if problems:
        raise SpecError(problems)
    followed = read_followed(service.status, service.model.follows)
    return replace(service.at(followed.commit), followed=followed)


def _model(r: Reader) -> Model:
    files = r.mapping("files")
    revision = r.text("revision", default="main", pattern=REVISION_PATTERN, longest=256)
    model = Model(
        uri=r.text("uri", pattern=URI_PATTERN, longest=1024, required=True),
        revision=revision,
        asked=revision,
        update_policy=r.choice("updatePolicy", ("Pinned", "Follow")),
        served_names=r.texts("servedNames", pattern=SERVED_NAME_PATTERN, most=16, longest=128),
        secret_ref=read_secret_ref(r.mapping("secretRef"), "token"),
        service_account=r.text("serviceAccountName", pattern=ACCOUNT_PATTERN, longest=253),
        endpoint=r.text("endpoint", pattern=r"^(https?://[^ ]+)?$", longest=1024),
        allow=files.texts("allow", most=32, longest=256),
        ignore=files.texts("ignore", most=32, longest=256),
        sha256=tuple(sorted(r.text_map("sha256", pattern=r"^[0-9a-f]{64}$", most=64).items())),
        quantization=r.choice("quantization", tuple(QUANTIZATIONS)),
        kv_cache_dtype=r.choice("kvCacheDtype", tuple(KV_CACHE_DTYPES)),
        adapters=read_adapters(r, SERVED_NAME_PATTERN, REVISION_PATTERN),
    )
    for part in (files, r):
        part.finish()
    return model


POOL_NEVER_WAKES = (
    "spec.endpoint.inferencePool: holds pods alone, so no request would wake the service; it needs autoscaling.min of "
    "at least 1"
)


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
    if model.update_policy == "Follow" and not service.cache.has_volume:
        found.append("spec.model.updatePolicy: Follow needs a cache volume, cache.mode Auto or PVC")
    if model.service_account and service.cache.mode == "None":
        found.append("spec.model.serviceAccountName: with cache.mode None pods fetch, and they have no identity")
    if model.endpoint and not (model.in_store or model.scheme in (*HUBS, "oci")):
        found.append("spec.model.endpoint: only hubs, oci:// and object stores have an endpoint")
    if model.revision != "main" and model.scheme not in HUBS:
        found.append("spec.model.revision: only hf:// and modelscope:// sources have revisions")
    if model.adapters is not None:
        names, ranks = service.served_names, service.parallelism.ranks
        found.extend(adapter_problems(model.adapters, names, volume=_shared_volume(service), ranks=ranks))
    if (model.allow or model.ignore) and model.scheme == "https":
        found.append("spec.model.files: an https:// source is one file")
    if resources.gpu_products and not resources.on_gpu:
        found.append("spec.resources.gpuProducts: needs gpus of at least 1, or claims")
    if resources.memory and quantity(service.runtime.shm_size) >= quantity(resources.memory):
        found.append("spec.runtime.shmSize: must be less than resources.memory, which it counts against")
    found.extend(follow_problems(model.update_policy, model.uri, model.revision, service.cache.existing_claim))
    if service.observability.otlp_endpoint and engine_guard.says("otlp-traces-endpoint", service.runtime.args):
        found.append("spec.observability.otlpEndpoint: runtime.args has --otlp-traces-endpoint too; give one of them")
    found.extend(parallelism_problems(service.parallelism, resources))
    found.extend(cache_problems(service.cache, model.scheme))
    if service.autoscaling is not None:
        found.extend(autoscaling_problems(service.autoscaling, service.replicas))
        if service.endpoint.inference_pool is not None and service.autoscaling.scale_to_zero is not None:
            found.append(POOL_NEVER_WAKES)
    return found


def _shared_volume(service: InferenceService) -> bool:
    """Whether a Job can write to the volume of pods that run."""
    cache = service.cache
    return cache.has_volume and not service.in_place and cache.access_mode != "ReadWriteOncePod"


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


def _fetched(raw: Mapping[str, Any]) -> FetchedModel | None:
    texts = [raw.get(key) for key in ("resolvedRevision", "digest", "path", "serve")]
    size = raw.get("bytes")
    if not all(isinstance(text, str) for text in texts) or not isinstance(size, int):
        return None
    shape = raw.get("shape")
    shape = shape if isinstance(shape, Mapping) else {}
    numbers = [shape.get(key) for key in ("layers", "kvHeads", "headDim", "maxContext", "loraLine")]
    revision, digest, path, serve = (str(text) for text in texts)
    return FetchedModel(revision, digest, size, path, serve, *(n if isinstance(n, int) else 0 for n in numbers))
