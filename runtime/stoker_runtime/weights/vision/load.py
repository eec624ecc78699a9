"""Loads a vision tower's weights from safetensors, or draws them, into one block of device memory.

Invariants: names, shapes and lengths are checked before a byte is moved; of a checkpoint, only what is the tower's is
looked at, and a tensor of it without a place is an error. Towers are stored in 16 or 32 bits, whatever the text model's
weights are: a quantized linear is refused by name. What no tensor fills is zero.
Knows nothing of how the tower computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from stoker_runtime.checkpoint.safetensors_index import read_checkpoint_index
from stoker_runtime.checkpoint.tensor_entry import TensorEntry, find_entry
from stoker_runtime.errors import ModelError
from stoker_runtime.models.config_source import ModelSource
from stoker_runtime.models.parameter import Role, aligned
from stoker_runtime.models.vision.spec import Piece, VisionSpec, VisionTensor
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES, CopyLanes
from stoker_runtime.weights.random import STD
from stoker_runtime.weights.upload_ahead import UploadAhead

Plan = list[tuple[VisionTensor, list[TensorEntry]]]

# What quantizers leave beside a linear's numbers, or in their place.
QUANTIZED = re.compile(
    r"(.*)\.(q(weight|zeros)|scales|g_idx|weight_(packed|scale|scale_inv|scale_2|zero_point|shape|g_idx|format)"
    r"|(input|output)_scale|input_zero_point|weight\.(absmax|quant_map|nested_.*|quant_state\..*)|SCB|blocks)"
)


def load_vision(
    source: ModelSource,
    spec: VisionSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    ahead: UploadAhead | None = None,
) -> dict[str, Tensor]:
    """Every tensor of `spec.tensors` by name, as `dtype` on `device`; `seed` draws a shape's. `ahead` may hold the
    files' bytes there already, and is closed.

    Raises ModelError naming the file and tensor that are missing, unknown, misshaped, quantized or cut short.
    """
    plan = None if source.path is None else plan_vision(spec, read_checkpoint_index(source.path))
    weights = _allocate(spec, device, dtype)
    if plan is None:
        _draw(spec, weights, torch.Generator(device=device).manual_seed(seed))
        return weights
    with CopyLanes(device, ahead) as lanes:
        lanes.fence()
        futures = []
        for tensor, entries in plan:
            whole = weights[tensor.parameter.name]
            for piece, entry in zip(tensor.pieces, entries, strict=True):
                rows = whole[piece.row : piece.row + piece.rows]
                if piece.transposed or tensor.offset or rows[:1].numel() > piece.columns:
                    decode = _decoder(entry, piece, tensor.offset, rows[:1].numel())
                    futures += lanes.submit_decoded(entry, rows, piece.rows if piece.transposed else 1, decode)
                else:
                    futures += lanes.submit_plain(entry, rows)
        lanes.join(futures)
    return weights


def plan_vision(spec: VisionSpec, entries: Mapping[str, TensorEntry]) -> Plan:
    """Each final tensor with the checkpoint tensors that make its rows, all checked."""
    own = _own(spec, entries)
    for name, entry in own.items():
        quantized = QUANTIZED.fullmatch(name)
        if quantized is not None or entry.encoding not in PLAIN_DTYPES:
            module = quantized[1] if quantized is not None else name.removesuffix(".weight")
            raise ModelError(
                f"{entry.file}: {module} is quantized ({entry.name} is {entry.encoding}); "
                f"a vision tower's weights must be {', '.join(PLAIN_DTYPES)}."
            )
    plan: Plan = []
    used: set[str] = set()
    for tensor in spec.tensors():
        found = [find_entry(own, piece.tensor, piece.shape, spec.architecture) for piece in tensor.pieces]
        plan.append((tensor, found))
        used |= {piece.tensor for piece in tensor.pieces}
    for name, entry in own.items():
        if name not in used:
            raise ModelError(f"{entry.file}: tensor {entry.name} has no place in the tower of a {spec.architecture}.")
    return plan


def _own(spec: VisionSpec, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """What is the tower's, by the names that the spec has."""
    own: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        known = spec.names.canonical(name)
        if known.startswith(spec.names.own) and re.fullmatch(spec.names.ignored, known) is None:
            own[known] = entry
    return own


def _allocate(spec: VisionSpec, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    storage = torch.zeros(spec.parameter_bytes(str(dtype).removeprefix("torch.")), dtype=torch.uint8, device=device)
    weights: dict[str, Tensor] = {}
    used = 0
    for parameter, _, _ in spec.tensors():
        kind = torch.float32 if parameter.dtype == "float32" else dtype
        num_bytes = parameter.elements * kind.itemsize
        weights[parameter.name] = storage[used : used + num_bytes].view(kind).view(parameter.shape)
        used += aligned(num_bytes)
    return weights


def _decoder(entry: TensorEntry, piece: Piece, offset: float, width: int) -> Callable[[Tensor], Tensor]:
    """A function from the bytes of whole rows, or of all where they change places with columns, to `width` numbers a
    row.
    """
    dtype = PLAIN_DTYPES[entry.encoding]

    def decode(raw: Tensor) -> Tensor:
        found = raw.view(dtype).float()
        if len(piece.shape) == 1:
            return found + offset
        if piece.transposed:
            return found.view(piece.columns, piece.rows).t().contiguous()
        return functional.pad(found.view(-1, piece.columns), (0, width - piece.columns))

    return decode


def _draw(spec: VisionSpec, weights: dict[str, Tensor], generator: torch.Generator) -> None:
    """Norms 1, all else normal; what is zero in a tower that was loaded stays so."""
    for parameter, pieces, _ in spec.tensors():
        whole = weights[parameter.name]
        if parameter.role is Role.NORM:
            whole.fill_(1.0)
            continue
        for piece in pieces:
            rows = whole[piece.row : piece.row + piece.rows]
            (rows if rows.dim() == 1 else rows[:, : piece.columns]).normal_(0.0, STD, generator=generator)
