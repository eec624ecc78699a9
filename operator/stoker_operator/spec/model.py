"""What is served: spec.model, of which a canary has another.

Invariants: as in service.py: frozen, with the CRD's defaults and rules.
Knows nothing of the children an InferenceService gets.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_operator.spec.adapters import Adapter, read_adapters
from stoker_operator.spec.endpoint import SecretRef, read_secret_ref
from stoker_operator.spec.follow import follow_source
from stoker_operator.spec.reader import Reader

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
# As the spec says it: as `stoker serve` does.
QUANTIZATIONS = {
    "Auto": "auto", "None": "none", "FP8": "fp8", "W4": "w4", "AWQ": "awq", "GPTQ": "gptq",
    "CompressedTensors": "compressed-tensors", "ModelOpt": "modelopt", "MXFP4": "mxfp4", "GGUF": "gguf",
}  # fmt: skip
# Those that a checkpoint must be.
METHODS = {name: QUANTIZATIONS[name] for name in ("AWQ", "GPTQ", "CompressedTensors", "ModelOpt", "MXFP4")}
# What becomes GGUF's blocks in place: as the server's --isq does.
IN_SITU = {"Q8_0": "q8_0", "Q4K": "q4k"}
KV_CACHE_DTYPES = {"Auto": "auto", "BF16": "bfloat16", "FP16": "float16", "FP8": "fp8"}


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


def read_model(r: Reader) -> Model:
    """spec.model, or one that is made of it."""
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
        quantization=r.choice("quantization", (*QUANTIZATIONS, *IN_SITU)),
        kv_cache_dtype=r.choice("kvCacheDtype", tuple(KV_CACHE_DTYPES)),
        adapters=read_adapters(r, SERVED_NAME_PATTERN, REVISION_PATTERN),
    )
    for part in (files, r):
        part.finish()
    return model
