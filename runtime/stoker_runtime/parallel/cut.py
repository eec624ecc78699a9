"""A rank's slices of a checkpoint: each tensor's entry becomes that of the rows and columns which are the rank's.

A slice of rows lies in one piece; one of columns is a window in each row (`TensorEntry.stride`). In GGUF a row is a
row of blocks, of which those are read that hold a wanted number.

Invariants: the whole checkpoint was checked before against the whole model. What comes out has the names and shapes of
the rank's own spec, so that nothing after this knows that there are other ranks. No byte is read here.
Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from stoker_runtime.checkpoint.gguf_header import BLOCK_SIZES
from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.models.architectures import ARCHITECTURES
from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.parameter import Parameter
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.mixture import cut_stacked, stacked_axis
from stoker_runtime.parallel.place import Place
from stoker_runtime.parallel.split import (
    OF_EXPERTS,
    SPLITS,
    field_of,
    kv_heads,
    layer_of,
    piece_window,
    pieces_of,
    split_spec,
    whole_name,
)
from stoker_runtime.weights.routing import (
    GGUF_LAYERS,
    Vocabulary,
    as_laid_out,
    piece_rows,
    stored_form,
    tensor_names,
    widening_halves,
)

# Which dimension of a [n, k] weight each dimension of a tensor beside it follows, by the tensor's last name: of a
# weight itself, of scales, of integers in words, of their groups. Others, as input scales, are the same on every rank.
AXES = {
    "weight": "nk", "bias": "n", "weight_scale": "nk", "weight_scale_inv": "nk",
    "qweight": "kn", "qzeros": "kn", "scales": "kn", "g_idx": "k",
    "sinks": "n", "weight_packed": "nk", "weight_zero_point": "nk", "weight_g_idx": "k",
}  # fmt: skip

Entries = Mapping[str, TensorEntry]


class Cut:
    """The cutting of one model for one rank."""

    def __init__(self, whole: ModelSpec, place: Place) -> None:
        self.whole = whole
        self.spec = split_spec(whole, place)
        self._place = place
        self._first_layer = place.layers(whole.num_layers).start
        self._parameters = {each.name: each for each in whole.parameters()}
        self._local = {each.name for each in self.spec.parameters()}

    def entries(self, entries: Entries, vocabulary: Vocabulary) -> dict[str, TensorEntry]:
        """The rank's part of a checkpoint, under the names of its own layers."""
        found: dict[str, TensorEntry] = {}
        own = self._own_names(entries, vocabulary)
        if self._place.tensors == 1:
            return {name: entry for name, entry in own.items() if self._is_mine(name, vocabulary)}
        modules = _by_module(own)
        for parameter in self.spec.parameters():
            whole = self._whole(parameter.name)
            names = tensor_names(self.spec, parameter.name, vocabulary)
            if vocabulary is Vocabulary.GGUF and (halves := widening_halves(parameter.name, own)):
                found |= self._widening(whole, halves)
                continue
            stored = stored_form(self.spec, parameter.name, vocabulary)
            if stored.is_stacked:
                assert self.whole.moe is not None, "experts are of a mixture"
                stored = as_laid_out(self.spec, parameter.name, stored, own, self.whole.moe.ffn)
                found |= self._stacked(names[0], own, field_of(parameter.name), stored)
                continue
            sizes = piece_rows(self.whole, whole, len(tensor_names(self.whole, whole.name, vocabulary)))
            for piece, name in enumerate(names):
                module, _, suffix = name.rpartition(".")
                for last, entry in modules.get(module, {}).items():
                    # A bias is a parameter of its own; the one of a quantized linear may be a row of zeros.
                    if last == suffix or (suffix == "weight" and last != "bias"):
                        window = piece_window(self.whole, self._place, whole, piece)
                        shape = (sizes[piece], *whole.shape[1:])
                        found[entry.name] = window_of(entry, last, shape, window)
        return found

    def _stacked(self, name: str, own: Entries, field: str, stored: Stored) -> dict[str, TensorEntry]:
        """The rank's part of the tensor of all experts; in four bits there are two."""
        moe = self.whole.moe
        assert moe is not None, "experts are of a mixture"
        axis = stacked_axis(moe, self.whole.hidden, self._place, field, stored)
        names = (name, f"{name}_blocks", f"{name}_scales")
        return {each: cut_stacked(own[each], axis) for each in names if each in own}

    def _widening(self, whole: Parameter, halves: tuple[TensorEntry, ...]) -> dict[str, TensorEntry]:
        """The rank's heads of what widens latents, in a file that has keys and values apart, head by head."""
        rows, _ = piece_window(self.whole, self._place, whole, 0)
        each = whole.shape[0] // self.whole.heads
        return {half.name: rows_of(half, range(rows.start // each, rows.stop // each)) for half in halves}

    def _is_mine(self, name: str, vocabulary: Vocabulary) -> bool:
        """Whether a tensor of no layer belongs to this rank's stage; those of its layers do."""
        ends = [each.name for each in self._parameters.values() if layer_of(each.name) < 0]
        named = [end for end in ends if name in tensor_names(self.whole, end, vocabulary)]
        # A tied head that stands apart is made of the embedding's tensor.
        return not named or any(end in self._local for end in named)

    def _own_names(self, entries: Entries, vocabulary: Vocabulary) -> dict[str, TensorEntry]:
        """All entries, those of this rank's layers counted from its first, without those of others' layers."""
        prefix = ARCHITECTURES[self.whole.architecture].layers if vocabulary is Vocabulary.HF else GGUF_LAYERS
        layers, found = self._place.layers(self.whole.num_layers), {}
        for name, entry in entries.items():
            if name.startswith(prefix):
                layer, _, rest = name.removeprefix(prefix).partition(".")
                if int(layer) not in layers:
                    continue
                name = f"{prefix}{int(layer) - layers.start}.{rest}"
            found[name] = replace(entry, name=name)
        return found

    def whole_name(self, parameter: str) -> str:
        """The name in the whole model of a parameter of the rank's."""
        return whole_name(parameter, self._first_layer)

    def window(self, parameter: Parameter, piece: int) -> tuple[range, range]:
        """The rank's rows and columns of piece `piece` of the whole model's `parameter`."""
        return piece_window(self.whole, self._place, parameter, piece)

    def values(self, parameter: str, whole: Tensor) -> Tensor:
        """The rank's part of all values of its own `parameter`."""
        return self._part(self._whole(parameter), whole)

    def cache_scales(self, whole: Tensor) -> Tensor:
        """The rank's layers and heads of a cache's scales `[layers, 2, Hkv]`."""
        layers, heads = self._place.layers(self.whole.num_layers), kv_heads(self.whole, self._place)
        return whole[layers.start : layers.stop, :, heads.start : heads.stop].contiguous()

    def _part(self, parameter: Parameter, whole: Tensor) -> Tensor:
        if self.whole.moe is not None and SPLITS[field_of(parameter.name)] in OF_EXPERTS:
            here = self._place.experts(self.whole.moe.experts) if self._place.whole_experts else None
            return self._experts(parameter, whole, here or range(self.whole.moe.experts), self.whole.moe.experts)
        parts, at = [], 0
        for piece, rows in enumerate(piece_rows(self.whole, parameter, pieces_of(self.whole, parameter.name))):
            window, columns = piece_window(self.whole, self._place, parameter, piece)
            part = whole[at + window.start : at + window.stop]
            parts.append(part[:, columns.start : columns.stop] if part.dim() > 1 else part)
            at += rows
        return torch.cat(parts)

    def _experts(self, parameter: Parameter, whole: Tensor, here: range, experts: int) -> Tensor:
        """Of stacked experts those that are here, of each the rank's units."""
        pieces = pieces_of(self.whole, parameter.name)
        window, columns = piece_window(self.whole, self._place, parameter, 0)
        each = whole.view(experts, pieces, -1, *whole.shape[1:])[here.start : here.stop, :, window.start : window.stop]
        part = each[..., columns.start : columns.stop] if whole.dim() > 1 else each
        return part.reshape(-1, *part.shape[3:])

    def local_name(self, parameter: str) -> str | None:
        """The rank's own name of a parameter of the whole model; None where it is another stage's."""
        layer = layer_of(parameter)
        if layer >= 0 and layer not in self._place.layers(self.whole.num_layers):
            return None
        local = whole_name(parameter, -self._first_layer)
        return local if local in self._local else None

    def _whole(self, name: str) -> Parameter:
        return self._parameters[self.whole_name(name)]


def _by_module(entries: Entries) -> dict[str, dict[str, TensorEntry]]:
    modules: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        module, _, last = name.rpartition(".")
        modules.setdefault(module, {})[last] = entry
    return modules


def window_of(entry: TensorEntry, last: str, weight: tuple[int, ...], window: tuple[range, range]) -> TensorEntry:
    """The part of a tensor called `last` beside a weight of shape `weight` that belongs to the weight's `window`."""
    axes = AXES.get(last, "")
    if not axes or len(entry.shape) == 0:
        return entry
    sizes = {"n": weight[0], "k": weight[1] if len(weight) > 1 else 1}
    parts = {"n": window[0], "k": window[1]}
    spans = [scaled(parts[axis], sizes[axis], size) for axis, size in zip(axes, entry.shape, strict=False)]
    sliced = rows_of(entry, spans[0])
    return columns_of(sliced, spans[1]) if len(spans) > 1 else sliced


def scaled(part: range, of: int, size: int) -> range:
    """`part` of `of` things, among `size` groups of them; a group of all belongs to every part."""
    if size == 1:
        return range(1)
    # Groups may be cut short at the end alone, where a part ends with the whole.
    return range(part.start * size // of, -(-part.stop * size // of))


def rows_of(entry: TensorEntry, rows: range) -> TensorEntry:
    """Rows of an entry, which lie in one piece."""
    count = entry.shape[0]
    if len(rows) == count:
        return entry
    each = entry.num_bytes // count
    return replace(
        entry,
        shape=(len(rows), *entry.shape[1:]),
        offset=entry.offset + rows.start * each,
        num_bytes=len(rows) * each,
    )


def columns_of(entry: TensorEntry, columns: range) -> TensorEntry:
    """Columns of a matrix: the blocks of each row that hold them."""
    count, width = entry.shape
    if len(columns) == width:
        return entry
    row_bytes = entry.num_bytes // count
    block = BLOCK_SIZES.get(entry.encoding, 1)
    block_bytes = row_bytes * block // width
    first, beyond = columns.start // block, -(-columns.stop // block)
    return replace(
        entry,
        shape=(count, len(columns)),
        offset=entry.offset + first * block_bytes,
        num_bytes=count * (beyond - first) * block_bytes,
        stride=row_bytes,
        run=(beyond - first) * block_bytes,
        lead=columns.start - first * block,
    )
