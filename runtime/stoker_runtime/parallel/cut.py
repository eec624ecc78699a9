"""A rank's slices of a checkpoint: each tensor's entry becomes that of the rows and columns which are the rank's.

A slice of rows is some runs of bytes (`TensorEntry.runs`); one of columns is a window in each row. In GGUF a row is a
row of blocks, of which those are read that hold a wanted number.

Invariants: the whole checkpoint was checked before against the whole model. What comes out has the names and shapes of
the rank's own spec, so that nothing after this knows that there are other ranks. No byte is read here.
Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stoker_runtime.checkpoint.gguf_header import BLOCK_SIZES
from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.architectures import ARCHITECTURES
from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.parameter import Parameter
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.file_rows import Rows, file_rows, merged
from stoker_runtime.parallel.mixture import cut_stacked, stacked_axis
from stoker_runtime.parallel.place import Place
from stoker_runtime.parallel.split import layer_of, split_spec, whole_name
from stoker_runtime.parallel.windows import (
    OF_EXPERTS,
    SPLITS,
    column_window,
    field_of,
    kv_heads,
    piece_window,
    row_pieces,
)
from stoker_runtime.weights.routing import (
    GGUF_LAYERS,
    Vocabulary,
    as_laid_out,
    stored_form,
    tensor_names,
    widening_halves,
)

# Which dimension of a [n, k] weight each dimension of a tensor beside it follows, by the tensor's last name: of scales,
# of integers in words, of their groups. Others, as input scales, are the same on every rank.
AXES = {
    "weight": "nk", "weight_scale": "nk", "weight_scale_inv": "nk",
    "qweight": "kn", "qzeros": "kn", "scales": "kn", "g_idx": "k",
    "weight_packed": "nk", "weight_zero_point": "nk", "weight_g_idx": "k",
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
            if stored is Stored.BY_HEAD:
                found |= self._by_head(whole, names[0], own)
                continue
            turned = stored is Stored.COLUMNS
            for name, rows in self._file_rows(parameter.name, whole, names, vocabulary, own).items():
                module, _, suffix = name.rpartition(".")
                for last, entry in modules.get(module, {}).items():
                    # A bias is a parameter of its own; the one of a quantized linear may be a row of zeros.
                    if last == suffix or (suffix == "weight" and last != "bias"):
                        own_axes = "kn" if turned and len(entry.shape) > 1 else "nk"
                        axes = own_axes if last == suffix else AXES.get(last, "")
                        columns = column_window(self.whole, self._place, whole)
                        found[entry.name] = window_of(entry, axes, whole.shape, rows, columns)
        return found

    def _file_rows(
        self, name: str, whole: Parameter, names: tuple[str, ...], vocabulary: Vocabulary, own: Entries
    ) -> dict[str, Rows]:
        """By the rank's own names of the tensors that its parameter `name` is made of."""
        if SPLITS[field_of(name)] in OF_EXPERTS:
            pieces = row_pieces(self.whole, self._place, whole)
            each = ((rows, [window]) for rows, window in pieces * (len(names) // len(pieces)))
            return dict(zip(names, each, strict=True))
        # As if the whole model began with this rank's layers.
        return file_rows(self.whole, self._place, replace(whole, name=name), vocabulary, own)

    def _by_head(self, whole: Parameter, name: str, own: Entries) -> dict[str, TensorEntry]:
        """The tensors of the rank's heads, which count from 0."""
        heads, _ = piece_window(self.whole, self._place, whole, 0)
        mine = ((name.format(head=mine), own[name.format(head=head)]) for mine, head in enumerate(heads))
        return {each: replace(entry, name=each) for each, entry in mine}

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
        return {half.name: rows_of(half, [range(rows.start // each, rows.stop // each)]) for half in halves}

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
        """The rank's rows and columns of piece `piece`, as an adapter has it, of the whole model's `parameter`.

        Raises ConfigError where an adapter has several pieces in one matrix.
        """
        names = tensor_names(self.whole, parameter.name, Vocabulary.HF)
        if self._place.tensors > 1 and len(names) < len(row_pieces(self.whole, self._place, parameter)):
            raise ConfigError(
                f"enable_lora cannot go with tensor_parallel_size {self._place.tensors} for {self.whole.architecture}: "
                f"an adapter's {names[0].removesuffix('.weight')} is several matrices in one, and is not cut; "
                "leave --enable-lora or --tensor-parallel-size out.",
                param="enable_lora",
            )
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
        columns = column_window(self.whole, self._place, parameter)
        for rows, window in row_pieces(self.whole, self._place, parameter):
            part = whole[at + window.start : at + window.stop]
            parts.append(part[:, columns.start : columns.stop] if part.dim() > 1 else part)
            at += rows
        return torch.cat(parts)

    def _experts(self, parameter: Parameter, whole: Tensor, here: range, experts: int) -> Tensor:
        """Of stacked experts those that are here, of each the rank's units."""
        pieces = len(row_pieces(self.whole, self._place, parameter))
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


def window_of(entry: TensorEntry, axes: str, weight: tuple[int, ...], rows: Rows, columns: range) -> TensorEntry:
    """The part of a tensor beside a weight that belongs to the weight's `rows` and `columns`; its dimensions follow the
    weight's as `axes` says. `weight` is the shape of the whole parameter.
    """
    if not axes or len(entry.shape) == 0:
        return entry
    wide = weight[1] if len(weight) > 1 else 1
    parts: dict[str, tuple[int, list[range]]] = {"n": rows, "k": (wide, [columns])}
    for dimension, (axis, size) in enumerate(zip(axes, entry.shape, strict=False)):
        of, spans = parts[axis]
        cut = merged(dict.fromkeys(scaled(span, of, size) for span in spans))
        entry = columns_of(entry, cut) if dimension else rows_of(entry, cut)
    return entry


def scaled(part: range, of: int, size: int) -> range:
    """`part` of `of` things, among `size` groups of them; a group of all belongs to every part."""
    if size == 1:
        return range(1)
    # Groups may be cut short at the end alone, where a part ends with the whole.
    return range(part.start * size // of, -(-part.stop * size // of))


def rows_of(entry: TensorEntry, spans: Sequence[range]) -> TensorEntry:
    """Rows of an entry that lies in one piece."""
    count, taken = entry.shape[0], sum(map(len, spans))
    if list(spans) == [range(count)]:
        return entry
    each = entry.num_bytes // count
    found = replace(entry, shape=(taken, *entry.shape[1:]), num_bytes=taken * each)
    if len(spans) == 1:
        return replace(found, offset=entry.offset + spans[0].start * each)
    return replace(found, runs=tuple((span.start * each, len(span) * each) for span in spans))


def columns_of(entry: TensorEntry, spans: Sequence[range]) -> TensorEntry:
    """Columns of a matrix that lies in one piece: the blocks of each row that hold them."""
    count, width = entry.shape[:2]
    if list(spans) == [range(width)]:
        return entry
    assert not entry.runs, "a matrix is cut by rows or by columns"
    assert len(entry.shape) == 2, "columns are a matrix's"
    row_bytes = entry.num_bytes // count
    block = BLOCK_SIZES.get(entry.encoding, 1)
    assert block == 1 or len(spans) == 1, "numbers in blocks are cut in one place"
    block_bytes = row_bytes * block // width
    blocks = [range(span.start // block, -(-span.stop // block)) for span in spans]
    return replace(
        entry,
        shape=(count, sum(map(len, spans))),
        num_bytes=count * sum(map(len, blocks)) * block_bytes,
        stride=row_bytes,
        runs=tuple((each.start * block_bytes, len(each) * block_bytes) for each in blocks),
        lead=spans[0].start - blocks[0].start * block,
    )
