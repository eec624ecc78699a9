"""What a model's weights take of a device, by each kind that the operator's spec.model.quantization makes of them.

Invariants: the engine's own arithmetic of its own specs, without torch; reads headers, never tensors. A kind that the
engine refuses for this checkpoint is not in the report.
Knows nothing of GPUs' sizes, nor of what else they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import resolve_quantization
from stoker_runtime.images.rule import read_rule
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.encoders.spec import EncoderSpec
from stoker_runtime.models.parameter import Role, stored_bytes
from stoker_runtime.models.quantized_head import with_head
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.models.vision.table import read_vision
from stoker_runtime.parallel.place import Place, places
from stoker_runtime.parallel.split import problems, split_spec
from stoker_runtime.weights.block_formats import (
    EMBEDDING_MADE,
    KEPT,
    MADE,
    Formats,
    embedding_format,
    in_planes,
    made_formats,
    stored,
    why_decoded,
    why_slower,
)
from stoker_runtime.weights.packed.requantize import requantized

AUTO = "auto"
KINDS = (AUTO, "none", "fp8", "w4")
"""What `--quantization` and `--isq` make of weights, beside MADE and KEPT; a checkpoint's own methods are AUTO."""
MOST_RANKS = 16
"""The most ranks of which is told what one takes: 1, 2, 4 and so on, as far as the model can be cut."""
MOST_STAGES = 8
"""The most stages of a pipeline of which is told what one takes."""
GPU_DTYPE, HOST_DTYPE = "bfloat16", "float32"
"""What GPUs are served in, or a type of its size; and CPUs, where bf16 is not faster or is there twice."""
ENDS = ("embed", "head", "head_bias")
"""What is shared among ranks by rows of the vocabulary, and is the first or the last stage's of a pipeline."""


def weight_report(spec: ModelSpec, source: ModelSource) -> dict[str, Any]:
    """{"method", "pools", "stages", "fp8Head", "q8Embedding", "kinds": {KIND: {"embedding", "head", "ranks", "host"}}},
    in bytes; of a mixture "expertLayers" and each kind's "experts", too; of a model that sees "vision".

    `method`: how the checkpoint is quantized, by the engine's name for it, "" where it is not; `pools`: whether the
    model has no use for an output head. `embedding` and `head` are of the whole vocabulary; a head of 0 is the
    embedding's own memory, or not there. `ranks`: all else, with the fullest of 1, 2, 4, … ranks that share every
    layer. `stages`: the layers of the fullest of 1, 2, 3, … stages, as the checkpoint has them. `host`: all of it on a
    CPU. `fp8Head`: the head with `--quantize-head fp8`. `q8Embedding`: the embedding with `--quantize-embedding q8_0`,
    0 where that is refused. `experts`: the matrices of experts with one rank, of `expertLayers` layers. `vision`: what
    sees, which no rank shares: a tower on a GPU, and its pass over the largest image.
    Raises ModelError for a GGUF file whose tensors are not this model's.
    """
    on_gpu: Formats = {}
    on_cpu: Formats = {}
    kinds: list[str] = [*KINDS, *MADE]
    if source.kind is SourceKind.GGUF and source.path is not None:
        kept = [each for each in stored(spec, source.path) if not why_decoded(spec, each)]
        on_gpu = {each.parameter.name: each.formats for each in kept}
        on_cpu = {each.parameter.name: each.formats for each in kept if not why_slower(spec, each)}
        kinds.append(KEPT)
    parts = list(_parts(spec))
    head = _ends(with_head(spec, "fp8"), "none")["head"]
    found = {asked: _of_kind(parts, asked, on_gpu, on_cpu if asked == AUTO else on_gpu) for asked in kinds}
    report = _report(_method(spec), list(_stages(spec)), head, found, pools=False, embedding=_made_embedding(spec))
    if spec.moe is not None:
        report |= {"expertLayers": len(spec.moe.layers)}
    return report | _seeing(source)


def _seeing(source: ModelSource) -> dict[str, int]:
    try:
        tower, rule = read_vision(source), read_rule(source)
    except ModelError:
        return {}  # it can be served as a model of text alone
    if tower is None or rule is None:
        return {}
    patches = -(-rule.most_pixels // tower.patch_size**2)
    return {"vision": tower.parameter_bytes(GPU_DTYPE) + tower.working_bytes(patches, GPU_DTYPE)}


def pooled_report(spec: ModelSpec | EncoderSpec) -> dict[str, Any]:
    """The same of a model that pools, which runs on one rank and keeps no blocks; `spec` has no output head."""
    if isinstance(spec, EncoderSpec):
        size, host = spec.parameter_bytes(GPU_DTYPE), spec.parameter_bytes(HOST_DTYPE)
        kind = {"embedding": 0, "head": 0, "ranks": [size], "host": host}
        return _report("", [size], 0, {AUTO: kind, "none": kind}, pools=True)
    found = {asked: _of_kind([spec], asked, {}, {}) for asked in KINDS}
    return _report(_method(spec), list(_stages(spec))[:1], 0, found, pools=True)


def _report(
    method: str, stages: list[int], head: int, kinds: dict[str, dict[str, Any] | None], *, pools: bool,
    embedding: int = 0,
) -> dict[str, Any]:
    told = {name: kind for name, kind in kinds.items() if kind is not None}
    sizes = {"fp8Head": head, "q8Embedding": embedding}
    return {"method": method, "pools": pools, "stages": stages, **sizes, "kinds": told}


def _made_embedding(spec: ModelSpec) -> int:
    (name,) = EMBEDDING_MADE.values()
    try:
        return _ends(in_planes(spec, embedding_format(spec, name)), "none")["embedding"]
    except ConfigError:
        return 0


def _method(spec: ModelSpec) -> str:
    packing = spec.moe.packing if spec.moe is not None else ""
    return packing or (spec.checkpoint.method if spec.checkpoint is not None else "")


def _stages(spec: ModelSpec) -> Iterator[int]:
    """Bytes of the layers of the fullest of 1, 2, 3, … stages."""
    kind, count = resolve_quantization(AUTO, spec), spec.num_layers
    sizes = [sum(stored_bytes(each, GPU_DTYPE, kind) for each in spec.layer_parameters(at)) for at in range(count)]
    for stages in range(1, min(MOST_STAGES, count) + 1):
        yield max(sum(sizes[at] for at in place.layers(count)) for place in places(1, stages))


def _parts(spec: ModelSpec) -> Iterator[ModelSpec]:
    """The model, and what the first of 2, 4, … ranks has of it."""
    yield spec
    ranks = 2
    # What is not cut in two is not cut in four.
    while ranks <= MOST_RANKS and next(problems(spec, Place(0, ranks, 1)), None) is None:
        try:
            yield split_spec(spec, Place(0, ranks, 1))
        except (ConfigError, ModelError):
            return
        ranks *= 2


def _of_kind(parts: list[ModelSpec], asked: str, on_gpu: Formats, on_cpu: Formats) -> dict[str, Any] | None:
    """None for a kind that the engine refuses for this checkpoint."""
    whole, host = (_resting(parts[0], asked, kept) for kept in (on_gpu, on_cpu))
    try:
        kind = resolve_quantization(asked, whole)
    except ConfigError:
        return None
    # Several ranks do not share a file's blocks: they decode them, which is what "none" tells.
    shared = [] if on_gpu and asked in (AUTO, KEPT) else parts[1:]
    ranks = [_others(whole, kind), *_of_ranks(shared, asked)]
    experts = sum(stored_bytes(each, GPU_DTYPE, kind) for each in whole.parameters() if each.role is Role.EXPERTS)
    told = {**_ends(whole, kind), "ranks": ranks, "host": host.parameter_bytes(HOST_DTYPE, kind)}
    return {**told, "experts": experts} if experts else told


def _of_ranks(parts: list[ModelSpec], asked: str) -> Iterator[int]:
    for part in parts:
        part = _resting(part, asked, {})
        try:
            yield _others(part, resolve_quantization(asked, part))
        except ConfigError:
            return  # a part of experts that is not made so


def _resting(spec: ModelSpec, asked: str, kept: Formats) -> ModelSpec:
    """The spec with what rests in blocks: those that are made, or these that are `kept`."""
    if asked in MADE:
        spec = requantized(EngineConfig(model="", isq=asked), spec)
        return in_planes(spec, made_formats(spec, MADE[asked])[0])
    return in_planes(spec, kept) if asked in (AUTO, KEPT) else spec


def _ends(spec: ModelSpec, quantization: str) -> dict[str, int]:
    sizes = {each.name: stored_bytes(each, GPU_DTYPE, quantization) for each in spec.parameters() if each.name in ENDS}
    return {"embedding": sizes.pop("embed"), "head": sum(sizes.values())}


def _others(spec: ModelSpec, quantization: str) -> int:
    return spec.parameter_bytes(GPU_DTYPE, quantization) - sum(_ends(spec, quantization).values())
