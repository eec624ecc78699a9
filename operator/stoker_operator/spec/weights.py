"""What a prefetch reports of a model's weights by kinds of quantization, read and remembered.

Invariants: what does not read as such a report is none; bytes are the engine's own sums.
Knows nothing of how a service is spread over GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KindBytes:
    """Bytes of the weights as a kind of quantization has them. A `head` of 0 is the embedding's own memory.

    `ranks`: all but embedding and head, with the fullest of 1, 2, 4, … ranks of tensor parallelism. `host`: all of it
    on a CPU. `experts`: what of the first of `ranks` is matrices of experts.
    """

    embedding: int
    head: int
    ranks: tuple[int, ...]
    host: int
    experts: int = 0


@dataclass(frozen=True, slots=True)
class WeightReport:
    """The kinds by the engine's names; one that it refuses for this checkpoint is not there.

    `stages`: bytes of the layers of the fullest of 1, 2, 3, … stages of a pipeline, as the checkpoint has them;
    `fp8_head`: of the head with --quantize-head fp8; `q8_embedding`: of the embedding with --quantize-embedding q8_0, 0
    where the engine refuses that, or nothing was reported of it. `method`: how the checkpoint is quantized, "" where it
    is not; `pools`: the model embeds or scores, and has no head; `expert_layers`: how many layers have experts;
    `vision`: what sees images, weights and a pass of it, on each GPU that embeds tokens.
    """

    stages: tuple[int, ...]
    fp8_head: int
    kinds: Mapping[str, KindBytes]
    method: str = ""
    pools: bool = False
    q8_embedding: int = 0
    expert_layers: int = 0
    vision: int = 0


def read_weights(raw: Any) -> WeightReport | None:
    """The report that is in a `shape`; None for one that has none, as those of before."""
    try:
        kinds = {str(name): _kind(each) for name, each in raw["kinds"].items()}
        method, pools = str(raw["method"]), bool(raw["pools"])
        more = (_size(raw.get(name, 0)) for name in ("q8Embedding", "expertLayers", "vision"))
        return WeightReport(_sizes(raw["stages"]), _size(raw["fp8Head"]), kinds, method, pools, *more)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def weights_status(report: WeightReport) -> dict[str, Any]:
    """As it was read."""
    kinds = {name: {**asdict(kind), "ranks": list(kind.ranks)} for name, kind in report.kinds.items()}
    told = {"method": report.method, "pools": report.pools, "fp8Head": report.fp8_head}
    told |= {"q8Embedding": report.q8_embedding, "expertLayers": report.expert_layers}
    told |= {"vision": report.vision} if report.vision else {}
    return {**told, "stages": list(report.stages), "kinds": kinds}


def told_weights(size: int, kinds: Iterable[str], method: str = "") -> WeightReport:
    """What somebody says they take: `size` bytes as any of the `kinds`, shared evenly among ranks."""
    return WeightReport((size,), 0, dict.fromkeys(kinds, KindBytes(0, 0, (size,), size)), method)


def _kind(raw: Mapping[str, Any]) -> KindBytes:
    embedding, head, host = (_size(raw[name]) for name in ("embedding", "head", "host"))
    return KindBytes(embedding, head, _sizes(raw["ranks"]), host, _size(raw.get("experts", 0)))


def _size(raw: Any) -> int:
    """Raises ValueError for less than nothing."""
    if (found := int(raw)) < 0:
        raise ValueError(f"{found} bytes")
    return found


def _sizes(raw: Any) -> tuple[int, ...]:
    """Of 1, 2, … parts. Raises ValueError where nothing is said of one, which is the whole."""
    found = tuple(_size(each) for each in raw)
    if not found or found[0] < 1:
        raise ValueError("the whole has no size")
    return found
