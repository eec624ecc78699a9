"""Reads a PEFT folder into host memory, laid out as the device wants it.

Invariants: every tensor of the file has a place and every module that the configuration targets has its tensors, of the
right shapes, before anything is kept; otherwise a ModelError names the file and the tensor. The scale is part of B. A
rank reads its part of its own layers' tensors, and their shapes; those of other layers are for others to check.
May be called from any thread. Knows nothing of slots and devices.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stoker_runtime.adapters.layout import EMBEDDINGS, AdapterLayout, Place
from stoker_runtime.adapters.peft_config import PeftConfig, read_peft_config
from stoker_runtime.errors import ModelError

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
HEAD = "lm_head"
DTYPES = ("F32", "BF16", "F16", "F64")
PINNED_BYTES = 4 << 20
"""Bytes that are pinned at once: steps wait meanwhile, some 0.6 ms a MiB. A power of two, as torch takes them."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory: `ranks [places]` int32, its rank at each (0: none), and `pieces`, which one after
    the other are `[rank, layout.line]`, `rank` being the highest one.

    `path` is the folder that it was read from.
    """

    pieces: tuple[Tensor, ...]
    rank: int
    ranks: Tensor
    path: str

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(piece.nbytes for piece in self.pieces)

    def copy_to(self, lines: Tensor) -> None:
        """Copy the matrices into contiguous `lines [rank, layout.line]` on their stream, without waiting."""
        flat, start = lines.view(-1), 0
        for piece in self.pieces:
            flat[start : start + len(piece)].copy_(piece, non_blocking=True)
            start += len(piece)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two matrices of one piece of a place: A `[r, K]`, B `[rows, r]`."""

    a: str
    b: str
    rank: int
    scale: float


def read_adapter(
    path: str, layout: AdapterLayout, *, max_rank: int, dtype: torch.dtype, pinned: bool = False
) -> HostAdapter:
    """The adapter in the folder `path`, as `dtype`, pinned for copies to a GPU where asked.

    Raises ModelError for what is not a LoRA adapter of this model, or has a higher rank than `max_rank`.
    """
    folder = Path(path)
    config = read_peft_config(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        hint = " adapter_model.bin is a pickle: convert it." if (folder / "adapter_model.bin").exists() else ""
        raise ModelError(f"{folder}: there is no {WEIGHTS}.{hint}")
    try:
        with safe_open(file, "pt") as weights:
            pairs = _pairs(file, config, layout.model, set(weights.keys()))
            rank = max(pair.rank for pair in pairs.values())
            if rank > max_rank:
                raise ModelError(
                    f"{file}: its rank is {rank}, and this server has room for {max_rank}; raise --max-lora-rank.",
                    param="max_lora_rank",
                )
            lines = torch.zeros((rank, layout.line), dtype=dtype)
            ranks = torch.zeros(len(layout.places), dtype=torch.int32)
            for index, place in enumerate(layout.places):
                ranks[index] = _fill(file, weights, place, pairs, lines)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: cannot be read: {error}.") from error
    flat = lines.view(-1)
    pieces = tuple(_pinned(part) for part in flat.split(PINNED_BYTES // flat.element_size())) if pinned else (flat,)
    return HostAdapter(pieces, rank, _pinned(ranks) if pinned else ranks, path)


def _pinned(values: Tensor) -> Tensor:
    """A pinned copy of `values`."""
    return torch.empty_like(values, pin_memory=True).copy_(values)


def _pairs(file: Path, config: PeftConfig, layout: AdapterLayout, names: set[str]) -> dict[str, _Pair]:
    """The matrices of each module that the adapter changes. Raises ModelError."""
    spelled = _spelled(layout, names)
    room = list(spelled)
    targets = config.targets(room, HEAD)
    pairs = {}
    for module in targets:
        a, b = _tensor_names(layout, spelled[module], module)
        if a not in names or b not in names:
            raise ModelError(f"{file}: {config.rank_of(module)} ranks of {module} are missing: tensor {a} or {b}.")
        pairs[spelled[module]] = _Pair(a, b, config.rank_of(module), config.scale_of(module))
    unused = sorted(names - {name for pair in pairs.values() for name in (pair.a, pair.b)} - _copies(layout, spelled))
    if unused:
        raise ModelError(f"{file}: tensor {unused[0]} {_why_not(unused[0], room)}")
    if not pairs:
        raise ModelError(f"{file}: target_modules names no module of this model, which has {', '.join(room[:7])} ….")
    return pairs


def _spelled(layout: AdapterLayout, names: set[str]) -> dict[str, str]:
    """The model's modules by what the file calls them."""
    own, *others = layout.bases
    base = next((each for each in others if any(name.startswith(PREFIX + each) for name in names)), own)
    return {
        base + module.removeprefix(own) if module.startswith(own) else module: module for module in layout.modules
    }


def _copies(layout: AdapterLayout, spelled: dict[str, str]) -> set[str]:
    """Tensors that PEFT saves along with an adapter of the embedding or the head: the base model's own, not trained."""
    ends = {module for place in layout.places if place.name in EMBEDDINGS for module in place.modules}
    modules = [name for name, module in spelled.items() if module in ends]
    return {f"{PREFIX}{module}.{name}" for module in modules for name in ("weight", "base_layer.weight")}


def _why_not(name: str, room: list[str]) -> str:
    """Why a tensor has no place here, as the end of a sentence."""
    module = name.removeprefix(PREFIX).partition(".lora_")[0]
    if module == HEAD or module.endswith(("embed_tokens", "embeddings", *EMBEDDINGS)):
        return "adapts the embedding or the output head, for which there is no room; start with --lora-embeddings."
    if module in room:
        return "belongs to a module that target_modules does not name."
    near = difflib.get_close_matches(module, room, n=1)
    return f"belongs to no module of this model that can be adapted{f'; the nearest is {near[0]}' if near else ''}."


def _tensor_names(layout: AdapterLayout, module: str, spelled: str) -> tuple[str, str]:
    embedding = any(place.name == "embed" and module in place.modules for place in layout.places)
    if embedding:
        return f"{PREFIX}{spelled}.lora_embedding_A", f"{PREFIX}{spelled}.lora_embedding_B"
    return f"{PREFIX}{spelled}.lora_A.weight", f"{PREFIX}{spelled}.lora_B.weight"


def _fill(file: Path, weights: Any, place: Place, pairs: dict[str, _Pair], lines: Tensor) -> int:
    """Write the matrices of one place; the highest rank of its pieces. Raises ModelError for a wrong shape."""
    highest, row = 0, 0
    for index, piece in enumerate(place.pieces):
        rows = piece.height
        if (pair := pairs.get(piece.module)) is not None:
            ranks = range(pair.rank)
            a = _tensor(file, weights, pair.a, (pair.rank, piece.shape[1]), (ranks, piece.columns))
            b = _tensor(file, weights, pair.b, (piece.shape[0], pair.rank), (piece.rows, ranks))
            start = place.a + index * place.width
            lines[: pair.rank, start : start + place.columns] = a
            b = b[list(piece.order)] if piece.order else b
            start = place.b + row
            scaled = lines[: pair.rank, start : start + rows]
            scaled.copy_((b.float() * (pair.scale * place.factor)).T)
            if not bool(torch.isfinite(scaled).all()):  # kernels multiply it with zeros, for tokens of others
                raise ModelError(f"{file}: tensor {pair.b}, times its scale {pair.scale:g}, is beyond {lines.dtype}.")
            highest = max(highest, pair.rank)
        row += rows
    return highest


def _tensor(file: Path, weights: Any, name: str, shape: tuple[int, int], window: tuple[range, range]) -> Tensor:
    """The `window` of a tensor that has to be of this `shape`."""
    stored = weights.get_slice(name)
    if tuple(stored.get_shape()) != shape or stored.get_dtype() not in DTYPES:
        given = f"{stored.get_dtype()} {list(stored.get_shape())}"
        raise ModelError(f"{file}: tensor {name} is {given}; this model takes {list(shape)}.")
    rows, columns = window
    tensor: Tensor = stored[rows.start : rows.stop, columns.start : columns.stop]
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{file}: tensor {name} holds values that are not finite.")
    return tensor
