"""Loads an encoder's weights from safetensors or GGUF into one block of device memory.

Invariants: names, shapes and lengths are checked before a byte is moved, and each tensor goes straight to its final
rows; blocks of a GGUF file become numbers there. Of a checkpoint, heads for other tasks and buffers are left out; any
other tensor without a place is an error.
Knows nothing of how the encoder computes.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from stoker_runtime.checkpoint.gguf_header import BLOCK_SIZES, read_gguf_header
from stoker_runtime.checkpoint.safetensors_index import read_checkpoint_index
from stoker_runtime.checkpoint.tensor_entry import TensorEntry, find_entry
from stoker_runtime.errors import ModelError
from stoker_runtime.models.encoders.names import Piece
from stoker_runtime.models.encoders.spec import EncoderSpec
from stoker_runtime.models.parameter import Parameter, aligned
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES, CopyLanes
from stoker_runtime.weights.gguf_decode import make_decoder
from stoker_runtime.weights.upload_ahead import UploadAhead

log = logging.getLogger(__name__)

Plan = list[tuple[Parameter, list[TensorEntry]]]

# What a masked language model or a pooling layer leaves in a checkpoint, and buffers of old ones.
HARMLESS = re.compile(
    r"cls\..*|lm_head\..*|(pooler|head)\.dense\.(weight|bias)|head\.norm\.(weight|bias)|decoder\.(weight|bias)"
    r"|embeddings\.(position_ids|token_type_ids)|.*\brotary_emb\.inv_freq"
)


def load_encoder(
    path: Path, spec: EncoderSpec, device: torch.device, dtype: torch.dtype, ahead: UploadAhead | None = None
) -> dict[str, Tensor]:
    """Every tensor of `spec.tensors` by name, as `dtype` on `device`, from a folder or a .gguf file; `ahead` may hold
    the files' bytes there already.

    Raises ModelError naming the file and tensor that are missing, unknown, misshaped or cut short.
    """
    plan = plan_encoder(spec, read_gguf_header(path).tensors if path.is_file() else read_checkpoint_index(path))
    _announce(plan, dtype)
    storage = torch.empty(spec.parameter_bytes(str(dtype).removeprefix("torch.")), dtype=torch.uint8, device=device)
    weights: dict[str, Tensor] = {}
    used = 0
    with CopyLanes(device, ahead) as lanes:
        lanes.fence()
        futures = []
        for parameter, entries in plan:
            num_bytes = parameter.elements * dtype.itemsize
            whole = storage[used : used + num_bytes].view(dtype).view(parameter.shape)
            used += aligned(num_bytes)
            weights[parameter.name] = whole
            for entry, rows in zip(entries, whole.chunk(len(entries)), strict=True):
                if _is_in_blocks(entry):
                    futures += lanes.submit_decoded(entry, rows, 1, make_decoder(entry, 0))
                else:
                    futures += lanes.submit_plain(entry, rows)
        lanes.join(futures)
    return weights


def _is_in_blocks(entry: TensorEntry) -> bool:
    return BLOCK_SIZES.get(entry.encoding, 1) > 1


def _announce(plan: Plan, dtype: torch.dtype) -> None:
    """Say in the log what does not stay as the file has it."""
    counts = Counter(entry.encoding for _, entries in plan for entry in entries if _is_in_blocks(entry))
    if counts:
        named = ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))
        log.info("weights: an encoder keeps no blocks; decoded to %s: %s", str(dtype).removeprefix("torch."), named)


def plan_encoder(spec: EncoderSpec, entries: Mapping[str, TensorEntry]) -> Plan:
    """Each final tensor with the checkpoint tensors that make its rows, all checked."""
    # Checkpoints of the bare model have no prefix; those with a head have one.
    base = f"{spec.names.base}."
    prefix = base if spec.names.base and any(name.startswith(base) for name in entries) else ""
    plan: Plan = []
    used: set[str] = set()
    for parameter, pieces in spec.tensors(prefix):
        shape = (parameter.shape[0] // len(pieces), *parameter.shape[1:])
        plan.append((parameter, [_entry(spec, entries, piece, shape) for piece in pieces]))
        used |= {piece.module for piece in pieces}
    for name, entry in entries.items():
        if name not in used and HARMLESS.fullmatch(name.removeprefix(prefix)) is None:
            raise ModelError(f"{entry.file}: tensor {name} has no place in a {spec.architecture}.")
    return plan


def _entry(spec: EncoderSpec, entries: Mapping[str, TensorEntry], piece: Piece, shape: tuple[int, ...]) -> TensorEntry:
    """The rows of a checkpoint's tensor that are `piece`."""
    name, part, parts = piece
    if parts * shape[0] == 1 and name in entries and entries[name].shape == shape[1:]:
        # A single row, which GGUF writes as a vector.
        entries = {name: replace(entries[name], shape=shape)}
    entry = find_entry(entries, name, (shape[0] * parts, *shape[1:]), spec.architecture)
    if entry.encoding not in PLAIN_DTYPES and not _is_in_blocks(entry):
        raise ModelError(f"{entry.file}: tensor {name} is {entry.encoding}; supported are {', '.join(PLAIN_DTYPES)}.")
    size = entry.num_bytes // parts
    return replace(entry, shape=shape, offset=entry.offset + part * size, num_bytes=size)
