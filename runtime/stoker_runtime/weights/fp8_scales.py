"""The scales of a checkpoint in FP8, or in INT8 on both sides: found beside their weights, checked, and copied to where
the kernels read them.

A weight `x.weight` has its scale in `x.weight_scale` or `x.weight_scale_inv`; the value is always weight · scale.

Invariants: every such weight has exactly one scale of a shape that fits it, and every scale its weight; otherwise a
ModelError names the tensor. Scales of activations are known and not used.
Knows nothing of how products are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from stoker_kernels.quant import BLOCK, LinearWeight, dequantize, scale_shape
from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ModelError
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.quantization.int8_checkpoint import Int8Checkpoint
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES, READABLE_DTYPES, CopyLanes
from stoker_runtime.weights.packed.mxfp4 import read_bytes
from stoker_runtime.weights.routing import Route, Vocabulary, is_harmless, rows_of

FP8_ENCODING = "F8_E4M3"
ENCODINGS = {"fp8_channel": FP8_ENCODING, "fp8_block": FP8_ENCODING, "int8_channel": "I8"}
"""safetensors' word for the numbers of a kind of weight that has scales beside it."""
SUFFIXES = ("_scale", "_scale_inv")
WEIGHT_SCALES = tuple(f"weight{suffix}" for suffix in SUFFIXES)
UNUSED = ("input_scale", "activation_scale", "input_scale_ub", "q_scale", "output_scale")

Entries = dict[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class ScaleRoute:
    """Scale `entry` belongs to rows `[row, row + rows)` of a final tensor; `spread`: one number for all of them."""

    entry: TensorEntry
    row: int
    rows: int
    spread: bool


def split_scales(spec: ModelSpec, entries: Entries) -> tuple[Entries, Entries]:
    """The tensors that have a place in the model, and the scales of weights; unused scales are in neither."""
    if spec.checkpoint is None:
        return entries, {}
    kinds = {name: name.rpartition(".")[2] for name in entries}
    weights = {name: entry for name, entry in entries.items() if kinds[name] not in (*WEIGHT_SCALES, *UNUSED)}
    return weights, {name: entry for name, entry in entries.items() if kinds[name] in WEIGHT_SCALES}


def plan_scales(
    spec: ModelSpec, routes: Mapping[str, tuple[Route, ...]], scales: Entries
) -> dict[str, tuple[ScaleRoute, ...]]:
    """The scales of each final tensor that the checkpoint holds in FP8. Raises ModelError naming the tensor."""
    plan: dict[str, tuple[ScaleRoute, ...]] = {}
    for parameter in spec.parameters():
        if parameter.kind in ENCODINGS:
            pieces = routes[parameter.name]
            last = pieces[-1]
            plan[parameter.name] = tuple(_route(piece, parameter.kind, scales, piece is last) for piece in pieces)
    used = {route.entry.name for found in plan.values() for route in found}
    used |= {piece.scales.name for pieces in routes.values() for piece in pieces if piece.scales is not None}
    for name, entry in scales.items():
        if name not in used and not is_harmless(spec, name, Vocabulary.HF):
            raise ModelError(f"{entry.file}: tensor {name} is the scale of no quantized weight.")
    return plan


def with_scales(
    spec: ModelSpec, routes: Mapping[str, tuple[Route, ...]], scales: Entries, *, all_widened: bool = False
) -> dict[str, tuple[Route, ...]]:
    """`routes`, those of what the checkpoint has in FP8 and this decoder in 16 bits with the scales to widen it by;
    `all_widened`: and of all that it has in FP8 or INT8.
    """
    found = dict(routes)
    for parameter in spec.parameters():
        own = spec.checkpoint_of(parameter.name)
        if not isinstance(own, Fp8Checkpoint | Int8Checkpoint):
            continue
        if parameter.role is Role.LATENT or (all_widened and parameter.kind in ENCODINGS):
            found[parameter.name] = tuple(
                replace(piece, scales=_route(piece, own.kind, scales, is_last=True).entry)
                if piece.entry.encoding == ENCODINGS[own.kind]
                else piece
                for piece in routes[parameter.name]
            )
    return found


def widen(raw: Tensor, encoding: str, shape: tuple[int, ...], scales: TensorEntry) -> Tensor:
    """The numbers of a weight of `shape` in FP8 or INT8 from its bytes, all of them, and its scales: fp32. Raises
    ModelError.
    """
    scale = read_bytes(scales).view(PLAIN_DTYPES[scales.encoding]).float()
    data = raw.view(READABLE_DTYPES[encoding]).view(shape)
    if scale.numel() == 1:
        return data.float() * scale
    if scales.shape == scale_shape("fp8_block", *shape):
        return dequantize(LinearWeight(data, scale.view(scales.shape), "fp8_block")).float()
    return data.float() * scale.view(-1, 1)


def _route(piece: Route, kind: str, scales: Entries, is_last: bool) -> ScaleRoute:
    weight = piece.entry
    if weight.encoding != ENCODINGS[kind]:
        raise ModelError(
            f"{weight.file}: tensor {weight.name} is {weight.encoding}, but quantization_config says "
            f"{ENCODINGS[kind]}; modules that are not quantized must be named there."
        )
    found = [scales[name] for name in (f"{weight.name}{suffix}" for suffix in SUFFIXES) if name in scales]
    if len(found) != 1:
        problem = "lacks" if not found else "has both forms of"
        raise ModelError(f"{weight.file}: the checkpoint {problem} {weight.name}_scale, the scale of its weight.")
    scale, (rows, columns) = found[0], piece.shape
    if scale.encoding not in PLAIN_DTYPES:
        raise ModelError(f"{scale.file}: tensor {scale.name} is {scale.encoding}; it must be one of "
                         f"{', '.join(PLAIN_DTYPES)}.")  # fmt: skip
    whole = piece.source_rows or rows
    if kind == "fp8_block":
        expected = scale_shape("fp8_block", whole, columns)
        if scale.shape != expected:
            raise _misshaped(scale, f"{list(expected or ())}, one number for each {BLOCK}×{BLOCK} weights")
        if piece.source_rows:
            return _part_of_blocks(piece, scale)
        if not is_last and rows % BLOCK:
            raise ModelError(
                f"{weight.file}: tensor {weight.name} has {rows} rows, not a multiple of {BLOCK}: its block scales "
                "cannot be joined with the next one's."
            )
        return ScaleRoute(scale, piece.row, rows, spread=False)
    if prod(scale.shape) == 1 and rows != 1:
        return ScaleRoute(scale, piece.row, rows, spread=True)
    if scale.shape not in ((whole,), (whole, 1)):
        raise _misshaped(scale, f"one number, or [{whole}, 1]")
    if piece.source_rows:
        scale = rows_of(scale, piece.source, (rows, *scale.shape[1:]))
    return ScaleRoute(scale, piece.row, rows, spread=False)


def _part_of_blocks(piece: Route, scale: TensorEntry) -> ScaleRoute:
    """The scales of rows that lie in a group of a tensor. Raises ModelError where a block has rows of two parts."""
    rows = piece.shape[0]
    if any(each % BLOCK for each in (rows, piece.source, piece.row)):
        raise ModelError(
            f"{piece.entry.file}: tensor {piece.entry.name} is brought apart by {rows} rows; its block scales would "
            f"need a multiple of {BLOCK}."
        )
    part = rows_of(scale, piece.source // BLOCK, (rows // BLOCK, *scale.shape[1:]))
    return ScaleRoute(part, piece.row, rows, spread=False)


def _misshaped(scale: TensorEntry, expected: str) -> ModelError:
    return ModelError(f"{scale.file}: tensor {scale.name} is {list(scale.shape)}; its weight asks for {expected}.")


class ScaleCopies:
    """Copies of scales under way; `finish` once they are joined."""

    def __init__(self, lanes: CopyLanes, device: torch.device) -> None:
        self._lanes = lanes
        self._device = device
        self._spread: list[tuple[Tensor, Tensor]] = []

    def submit(self, routes: tuple[ScaleRoute, ...], kind: str, target: Tensor) -> list[Future[None]]:
        """Start copying the scales of one final tensor to `target`, which has its kind's shape."""
        futures: list[Future[None]] = []
        for route in routes:
            step = BLOCK if kind == "fp8_block" else 1
            rows = target[route.row // step : -(-(route.row + route.rows) // step)]
            if route.spread:
                one = torch.empty(1, dtype=torch.float32, device=self._device)
                self._lanes.fence()
                self._spread.append((rows, one))
                rows = one
            futures += self._lanes.submit_plain(route.entry, rows)
        return futures

    def finish(self) -> None:
        """Spread the scales that are one number over their rows."""
        for rows, one in self._spread:
            rows.copy_(one.expand_as(rows))
