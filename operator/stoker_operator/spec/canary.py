"""spec.canary: a second revision beside the stable one, how much it is asked, and by what it is judged.

Invariants: as in service.py: frozen, with the CRD's defaults and rules. A canary is another model or another runtime,
never both, so that a verdict says of what. What `merged` makes of the raw spec is what the parser reads.
Knows nothing of pods and of what becomes of a canary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker_operator.spec.endpoint import SecretRef
from stoker_operator.spec.model import Model, read_model
from stoker_operator.spec.reader import Reader
from stoker_operator.spec.runtime import Runtime, read_runtime

# What may differ: a field of the spec and what the parser makes of it.
FIELDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "model": {
        "uri": ("uri",),
        "revision": ("revision",),
        "secretRef": ("secret_ref",),
        "serviceAccountName": ("service_account",),
        "endpoint": ("endpoint",),
        "files": ("allow", "ignore"),
        "sha256": ("sha256",),
        "quantization": ("quantization",),
        "kvCacheDtype": ("kv_cache_dtype",),
    },
    "runtime": {
        "image": ("image",),
        "args": ("args",),
        "env": ("env",),
        "envFrom": ("env_from",),
        "contextLength": ("context_length",),
        "maxConcurrency": ("max_concurrency",),
        "shmSize": ("shm_size",),
    },
}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much worse than the stable pods' a canary's figures may be. `errors` in points of percent of requests that
    fail; `first_token` and `tokens` in percent: of the time to the first token, of the tokens a second of a stream.
    """

    errors: int = 1
    first_token: int = 50
    tokens: int = 20


@dataclass(frozen=True, slots=True)
class Canary:
    """Another `model` or `runtime` (the other one is None) for some of the requests. `shares` in percent, one after the
    other.

    `promotes`: after the last share it goes to all pods by itself. `window` in seconds, and `requests` of either side:
    so much each share takes at least. `identity` is plain data by which one canary is told from another; `same`: the
    spec asks for it already. `written` is the part of the spec that it replaces, as it then stands.
    """

    shares: tuple[int, ...]
    promotes: bool
    window: int
    requests: int
    tolerance: Tolerance
    model: Model | None
    runtime: Runtime | None
    same: bool = False
    identity: tuple[Any, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict, compare=False)


def merged(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a raw spec, {"model": …} or {"runtime": …}, as it stands with its canary in its place."""
    canary = _part(spec, "canary")
    if "runtime" in canary:
        return {"runtime": {**_part(spec, "runtime"), **_part(canary, "runtime")}}
    stable, given = _part(spec, "model"), _part(canary, "model")
    # Another source is a model of its own: a revision or a digest of the stable one says nothing of it. And what is
    # compared stays what it is, whatever the stable one follows.
    own = {key: stable[key] for key in stable if key != "updatePolicy"}
    kept = {key: own[key] for key in ("servedNames",) if key in own} if "uri" in given else own
    return {"model": {**kept, **given}}


def _part(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested mapping; an empty one where it is absent or none, which the reader has words for."""
    value = holder.get(name)
    return value if isinstance(value, Mapping) else {}


def read_canary(r: Reader, spec: Mapping[str, Any], model: Model, runtime: Runtime) -> Canary:
    """spec.canary, of the raw `spec` whose parts were read as `model` and `runtime`."""
    tolerance, given = r.mapping("tolerance"), {"model": r.mapping("model"), "runtime": r.mapping("runtime")}
    asked = [name for name in given if name in r.raw]
    if len(asked) != 1:
        r.problems.append(f"{r.path}: give one of model and runtime")
    if ("weight" in r.raw) == ("steps" in r.raw):
        r.problems.append(f"{r.path}: give one of weight and steps")
    weight = r.integer("weight", default=1, least=1, most=99)
    steps = r.integers("steps", least=1, most=99, longest=10)
    if "steps" in r.raw and (not steps or list(steps) != sorted(set(steps))):
        r.problems.append(f"{r.path}.steps: must grow from step to step, and there must be one")
    for name, fields in FIELDS.items():
        given[name].expect(*fields)
        given[name].finish()
        if name in asked and not given[name].raw:
            r.problems.append(f"{r.path}.{name}: must say what differs")
    written = merged(spec)
    part = next(iter(written))
    read: Callable[[Reader], Model | Runtime] = read_model if part == "model" else read_runtime
    other = read(Reader(written[part], f"{r.path}.{part}", r.problems))
    keys = {"uri", *given[part].raw} & FIELDS[part].keys()
    stable = model if part == "model" else runtime
    found = Canary(
        shares=steps or (weight,),
        promotes="steps" in r.raw,
        window=r.duration("window", 300, least=10, most=86400),
        requests=r.integer("requests", default=50, least=1, most=1000000),
        tolerance=_tolerance(tolerance),
        model=other if isinstance(other, Model) else None,
        runtime=other if isinstance(other, Runtime) else None,
        same=other in (runtime, replace(model, update_policy="Pinned")),
        identity=tuple(_values(part, each, keys) for each in (stable, other)),
        written=written,
    )
    r.finish()
    return found


def _values(part: str, read: Model | Runtime, keys: set[str]) -> dict[str, list[Any]]:
    """Some fields as plain data, with their defaults: the same whoever filled those in."""
    found = {key: [getattr(read, name) for name in FIELDS[part][key]] for key in sorted(keys)}
    return {key: [f"{item.name}/{item.key}" if isinstance(item, SecretRef) else item for item in values]
            for key, values in found.items()}  # fmt: skip


def _tolerance(r: Reader) -> Tolerance:
    found = Tolerance(
        r.integer("errors", default=1, least=0, most=100),
        r.integer("firstToken", default=50, least=0, most=10000),
        r.integer("tokens", default=20, least=0, most=100),
    )
    r.finish()
    return found
