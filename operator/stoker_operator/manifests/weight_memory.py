"""What weights take of a GPU, or of a pod's memory without one, by what the prefetch reported of them.

Invariants: pure arithmetic over the engine's own sums. What was not reported is not known, and no number stands for it.
Knows nothing of what else memory holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_operator.spec.engine_flags import given, number
from stoker_operator.spec.model import IN_SITU, METHODS
from stoker_operator.spec.quantity import GIB
from stoker_operator.spec.service import FetchedModel, InferenceService
from stoker_operator.spec.weights import KindBytes, WeightReport

# What quantization makes at load, or decodes, or keeps, by the engine's names; all else is as the checkpoint has it.
KINDS = {"None": "none", "FP8": "fp8", "W4": "w4", "GGUF": "gguf", **IN_SITU}
_UNREPORTED = "The prefetch did not report what the weights take, as one of this version does"


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes of weights: `least` of them, and `most`, which differ on CPUs alone. `unknown`: why neither is known."""

    least: float = 0.0
    most: float = 0.0
    unknown: str = ""


def gpu_weights(service: InferenceService, model: FetchedModel) -> WeightMemory:
    """Of the fullest of the GPUs of an engine. Of experts in host memory it is the place where a layer is copied to."""
    found = _reported(service, model)
    if isinstance(found, str):
        return WeightMemory(unknown=found)
    size = _of_fullest(service, *found)
    layer, most = _expert_layers(service, *found)
    if layer:
        # Another stage may have a layer of them more.
        size -= max(min(_asked_on_host(service) // layer, most // service.parallelism.pipeline) - 1, 0.0) * layer
    size += _seeing(service, found[0])
    return WeightMemory(size, size)


def _seeing(service: InferenceService, report: WeightReport) -> int:
    """Bytes of what sees images, in 16 bits, and of its pass over the largest."""
    return 0 if given(service).get("language-model-only", "false") != "false" else report.vision


def hosted_experts(service: InferenceService, model: FetchedModel) -> float:
    """Bytes of host memory that a GPU's experts take at most: whole layers of them, where it is known how large."""
    asked, found = _asked_on_host(service), _reported(service, model)
    layer, most = (0.0, 0) if isinstance(found, str) else _expert_layers(service, *found)
    return min(asked // layer, -(-most // service.parallelism.pipeline)) * layer if layer else asked


def _expert_layers(service: InferenceService, report: WeightReport, kind: KindBytes) -> tuple[float, int]:
    """Bytes of a layer's experts on one GPU, 0 where they are not known, and how many layers have any."""
    layers = report.expert_layers
    return (kind.experts / layers / service.parallelism.tensor if layers else 0.0), layers


def _asked_on_host(service: InferenceService) -> float:
    return number(given(service).get("cpu-offload-experts", "")) * GIB if service.resources.on_gpu else 0.0


def host_weights(service: InferenceService, model: FetchedModel) -> WeightMemory:
    """Of one engine without GPUs, all its ranks together. A CPU takes 32 bits where a GPU takes 16, or both."""
    found = _reported(service, model)
    if isinstance(found, str):
        return WeightMemory(unknown=found)
    _, kind = found
    whole, seeing = kind.embedding + kind.head + kind.ranks[0], _seeing(service, found[0])
    return WeightMemory(min(whole, kind.host) + seeing, max(whole, kind.host) + 2 * seeing)


def _reported(service: InferenceService, model: FetchedModel) -> tuple[WeightReport, KindBytes] | str:
    """What was reported of what spec and flags make of the weights; or why nothing was, as the start of a sentence."""
    report = model.weights
    if report is None:
        return _UNREPORTED
    asked, said = service.model.quantization, given(service)
    several, head = service.parallelism.ranks > 1, _quantizes_head(service)
    runner = said.get("runner", "auto")
    if runner != "auto" and (runner != "generate") != report.pools:
        return f"What the weights take with --runner {runner} was not reported"
    if service.resources.on_gpu and said.get("dtype", "") == "float32":
        return "What the weights take with --dtype float32 was not reported"
    kind = None if asked in METHODS and METHODS[asked] != report.method else report.kinds.get(_kind(service, model))
    if kind is None:
        return f"model.quantization is {asked}, which the engine refuses for this checkpoint"
    if asked == "GGUF" and (several or head):
        beside = "several ranks" if several else "--quantize-head"
        return f"model.quantization is GGUF, which the engine refuses with {beside}"
    if _quantizes_embedding(service) and (several or report.pools or not report.q8_embedding):
        return "--quantize-embedding is given, which the engine refuses for this model, or which was not reported"
    if report.pools and (several or head):
        return f"The engine refuses {'several ranks' if several else '--quantize-head'} for a model that pools"
    return report, kind


def _kind(service: InferenceService, model: FetchedModel) -> str:
    """The report's name for what spec and flags make of the weights."""
    asked = KINDS.get(service.model.quantization, "auto")
    decodes = service.parallelism.ranks > 1 or _quantizes_head(service)
    decodes |= given(service).get("batch-invariant", "") not in ("", "false")
    return "none" if asked == "auto" and model.serve.endswith(".gguf") and decodes else asked


def _of_fullest(service: InferenceService, report: WeightReport, kind: KindBytes) -> float:
    """The first stage has the embedding, the last one the head, and the layers may be fullest with either."""
    tensor, stages = service.parallelism.tensor, service.parallelism.pipeline
    head = report.fp8_head if _quantizes_head(service) else kind.head
    embedding = report.q8_embedding if _quantizes_embedding(service) else kind.embedding
    ends = embedding + head if stages == 1 else max(embedding, head)
    told = min(stages, len(report.stages))
    share = report.stages[told - 1] / report.stages[0] * told / stages
    return _of_rank(kind.ranks, tensor) * share + ends / tensor


def _of_rank(ranks: tuple[int, ...], tensor: int) -> float:
    """What one of so many ranks has: as reported, or by the part that the ranks share in the nearest report below."""
    at = min(tensor.bit_length(), len(ranks)) - 1
    reported = 1 << at
    if reported in (1, tensor):
        return ranks[at] * reported / tensor
    shared = (ranks[0] - ranks[at]) * reported / (reported - 1)
    return ranks[0] - shared + shared / tensor


def _quantizes_head(service: InferenceService) -> bool:
    return given(service).get("quantize-head", "none") != "none"


def _quantizes_embedding(service: InferenceService) -> bool:
    return given(service).get("quantize-embedding", "none") != "none"
