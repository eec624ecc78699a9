"""How a mixture of experts is cut: every expert by its units, or by whole experts; and windows of stacked tensors.

The router and what belongs to it are on every rank, which so choose alike. A shared expert is cut by its units either
way. What ranks give for a token is summed as it is behind any feed-forward.

Invariants: torch-free. A window is one dimension's part: of experts, or of units within each.
Knows nothing of what is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.place import Place
from stoker_runtime.weights.routing import MXFP4_BLOCK

# Fields of a mixture that a rank's part changes, and those that mean the same of it.
CUT_FIELDS = {"ffn", "shared_ffn", "held"}
SAME_FIELDS = {
    "layers", "experts", "top_k", "scoring", "renormalize", "scale", "groups", "top_groups", "group_top2", "jitter",
    "correction_bias", "router_bias", "expert_bias", "shared_gate", "limit", "packing", "hosted",
}  # fmt: skip


def part_of(moe: MoeSpec, place: Place) -> MoeSpec:
    """The mixture of the rank at `place`."""
    shared = moe.shared_ffn // place.tensors
    if place.whole_experts:
        return replace(moe, shared_ffn=shared, held=place.experts(moe.experts))
    return replace(moe, shared_ffn=shared, ffn=moe.ffn // place.tensors)


def check_whole_experts(spec: ModelSpec, place: Place) -> None:
    """Raises ConfigError where whole experts are to be shared among ranks and there are none, or too few."""
    if not place.whole_experts:
        return
    if spec.moe is None:
        problem = "the model has no experts; leave --enable-expert-parallel out."
    elif place.tensors > spec.moe.experts:
        problem = f"{place.tensors} ranks cannot share {spec.moe.experts} experts; lower --tensor-parallel-size."
    else:
        return
    raise ConfigError(f"enable_expert_parallel is set, but {problem}", param="enable_expert_parallel")


def mixture_problems(moe: MoeSpec, tensors: int, *, whole_experts: bool) -> Iterator[str]:
    """Why a mixture cannot be cut into `tensors` parts."""
    if moe.shared_ffn % tensors:
        yield f"the shared expert's width is {moe.shared_ffn}"
    if whole_experts:
        return
    if moe.ffn % tensors:
        yield f"the experts' width is {moe.ffn} (--enable-expert-parallel shares whole experts instead)"
    elif moe.packing and moe.ffn // tensors % MXFP4_BLOCK:
        yield (
            f"the experts would be cut at {moe.ffn // tensors}, within their blocks of {MXFP4_BLOCK} "
            "(--enable-expert-parallel shares whole experts instead)"
        )


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a stacked tensor is cut: seen as `before` rows of `size` things, to `part` of them in each row.

    `dim` is the dimension of the tensor's shape that becomes less for it.
    """

    before: int
    size: int
    part: range
    dim: int


def stacked_axis(moe: MoeSpec, hidden: int, place: Place, field: str, stored: Stored) -> Axis | None:
    """How the rank at `place` cuts the tensor of all experts' `field`, of the whole mixture; None: not at all."""
    bias, up = field.endswith("_bias"), "gate_up" in field
    if place.whole_experts:
        return Axis(1, moe.experts, place.experts(moe.experts), 0)
    # In four bits rows are rows, else they may be columns.
    columns = stored is not Stored.STACKED and not moe.packing
    units = place.units(moe.ffn)
    if not up:
        return None if bias else Axis(moe.experts * (1 if columns else hidden), moe.ffn, units, 1 if columns else 2)
    if stored is Stored.STACKED:
        return Axis(2 * moe.experts, moe.ffn, units, 1)
    if stored is Stored.STACKED_HALVES:
        return Axis(2 * moe.experts * hidden, moe.ffn, units, 2)
    # Gate and up take turns.
    return (
        Axis(moe.experts * hidden, moe.ffn, units, 2) if columns and not bias else Axis(moe.experts, moe.ffn, units, 1)
    )


def cut_stacked(entry: TensorEntry, axis: Axis | None) -> TensorEntry:
    """The part of a stacked tensor. In packed ones a number is less than a byte."""
    if axis is None:
        return entry
    row = entry.num_bytes // axis.before
    start, end = row * axis.part.start // axis.size, row * axis.part.stop // axis.size
    apart = axis.before > 1 and end - start < row
    sizes = list(entry.shape)
    sizes[axis.dim] = sizes[axis.dim] * len(axis.part) // axis.size
    return replace(
        entry,
        shape=tuple(sizes),
        offset=entry.offset + start,
        num_bytes=axis.before * (end - start),
        stride=row if apart else 0,
        runs=((0, end - start),) if apart else (),
    )
