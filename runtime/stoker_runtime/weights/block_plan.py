"""Which matrices rest in GGUF's blocks: those of a file whose formats are multiplied as they are, or what in-situ
quantization makes of 16 bits.

On a CPU blocks rest as a file has them, on a GPU in planes; the spec counts either. Where nobody asks, a GPU keeps all
that it multiplies, for memory, and a CPU those that it multiplies no slower than what was decoded.
Invariants: decided from headers and shapes, before memory is taken; what was a block in the file and is none in memory
is named with its reason and both sizes.
Knows nothing of how blocks are multiplied.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker_kernels.block_gemm import packing_refusal, packs
from stoker_kernels.launch import cc
from stoker_kernels.quant import BLOCK_FORMATS, block_row_bytes, plane_sizes
from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.block_parts import BlockPart
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.parameter import ITEM_BYTES, Parameter, Role
from stoker_runtime.models.quantization.fp4_scheme import EXPERTS_KIND
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES
from stoker_runtime.weights.gguf_entries import brought_apart
from stoker_runtime.weights.routing import Route, Vocabulary, route

KEPT = "gguf"
"""The value of `--quantization` that keeps blocks."""
UNASKED = ("auto", "none")
"""Those with which it is decided here what a file's blocks become."""
MADE = {"q8_0": ("Q8_0",), "q4k": ("Q4_K", "Q8_0")}
"""Values of `--isq` that make blocks: the formats, of which a matrix gets the first that its rows fill."""
FIELDS = ("embed", "head", "qkv", "output", "gate_up", "down", "shared_gate_up", "shared_down")
"""The matrices that are multiplied one by one; experts and routers are not."""
SHOWN = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Parameters of a file in blocks that become the model's type for one `reason`: their bytes there, their values."""

    reason: str
    names: tuple[str, ...]
    file_bytes: int
    elements: int

    def said(self, dtype: str) -> str:
        """In words, with what they take in the file and in `dtype`."""
        there, here = self.file_bytes / 2**20, self.elements * ITEM_BYTES[dtype] / 2**20
        sizes = f"{there:.1f} MiB of the file, {here:.1f} in {dtype}"
        return f"{self.reason}; decoded to the model's type: {_shown(self.names)} ({sizes})"


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """`spec` with the parts of each matrix that is in blocks. `held`: where those come from. `decoded`: what does not
    stay so, a warning unless it was `wanted`. `others`: what in-situ quantization makes of other matrices.
    """

    spec: ModelSpec
    held: str = ""
    decoded: tuple[Decoded, ...] = ()
    wanted: bool = False
    others: tuple[str, ...] = ()

    def announce(self, dtype: str) -> None:
        """Say in the log what is in blocks, and what is not; `dtype` is the model's type."""
        if self.held:
            log.info("weights: %s: %s", self.held, self.sizes or "none")
        for each in self.decoded:
            log.log(logging.INFO if self.wanted else logging.WARNING, "weights: %s", each.said(dtype))
        for text in self.others:
            log.warning("weights: %s", text)

    @property
    def sizes(self) -> str:
        """What each format takes in memory."""
        sizes: dict[str, int] = defaultdict(int)
        for parts in self.spec.blocks.values():
            for part in parts:
                sizes[part.format] += part.num_bytes
        return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sorted(sizes.items()))


def decoding_reason(config: EngineConfig, spec: ModelSpec, device: str) -> str:
    """Why no blocks of a file stay, by what was asked for and the device ("cpu" or "cuda"); "" where they may."""
    uncompiled = (cc.refusal("cpu_blocks") or packing_refusal()) if device == "cpu" else None
    reasons = (
        (config.batch_invariant, "--batch-invariant was given, which products with blocks are not"),
        (config.quantize_head != "none", "--quantize-head was given, beside which blocks are not kept"),
        (spec.part is not None, "blocks are not shared among several ranks"),
        (device == "cuda" and config.dtype == "float32", "no kernel for a GPU multiplies blocks in float32"),
        (uncompiled is not None, f"their kernel {uncompiled}"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def plan_blocks(
    spec: ModelSpec, source: ModelSource, asked: str, device: str, *, refused: str = "", whole: ModelSpec | None = None
) -> BlockPlan:
    """What rests in blocks on `device` ("cpu" or "cuda"): of a GGUF file where `asked` is "gguf", "auto" or "none", or
    made at load where it is a value of MADE; nothing else.

    `refused` is why no blocks of a file stay that nobody asked to (`decoding_reason`); `whole` is the model that `spec`
    is a rank's part of. Raises ConfigError, where blocks are asked for, for a model that is no GGUF file, and for
    blocks of a file that several ranks share.
    """
    path = source.path if source.kind is SourceKind.GGUF else None
    if asked in MADE:
        _refuse_uncompiled("isq", asked, device)
        return _made(spec, MADE[asked], device)
    if asked in UNASKED and path is not None:
        reason = f"--quantization {asked} was given" if asked == "none" else refused
        if reason:
            return _all_decoded(spec, whole or spec, path, reason, wanted=asked == "none")
        return _planned(spec, path, device, asked=False)
    if asked != KEPT:
        return BlockPlan(spec)
    if path is None:
        raise ConfigError(
            f"quantization is {KEPT}, but {source.name} is no .gguf file; leave --quantization out.",
            param="quantization",
        )
    if spec.part is not None:
        raise ConfigError(
            f"quantization is {KEPT}, whose blocks are not shared among ranks; leave it out, or serve on one rank.",
            param="quantization",
        )
    _refuse_uncompiled("quantization", asked, device)
    return _planned(spec, path, device, asked=True)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A parameter and its pieces in a file."""

    parameter: Parameter
    pieces: tuple[Route, ...]

    @property
    def field(self) -> str:
        return self.parameter.name.rpartition(".")[2]

    @property
    def in_blocks(self) -> bool:
        """Whether any of it is in blocks that become the model's type unless they are kept."""
        encodings = (piece.entry.encoding for piece in self.pieces)
        return self.parameter.kind != EXPERTS_KIND and any(each not in PLAIN_DTYPES for each in encodings)


def _stored(spec: ModelSpec, path: Path) -> list[_Stored]:
    routes = route(spec, brought_apart(spec, read_gguf_header(path).tensors), Vocabulary.GGUF)
    return [_Stored(parameter, routes[parameter.name]) for parameter in spec.parameters()]


def _all_decoded(spec: ModelSpec, whole: ModelSpec, path: Path, reason: str, *, wanted: bool) -> BlockPlan:
    named = [each for each in _stored(whole, path) if each.in_blocks]
    return BlockPlan(spec, decoded=_decoded({reason: named} if named else {}), wanted=wanted)


def _planned(spec: ModelSpec, path: Path, device: str, *, asked: bool) -> BlockPlan:
    blocks: dict[str, tuple[BlockPart, ...]] = {}
    decoded: dict[str, list[_Stored]] = defaultdict(list)
    for each in _stored(spec, path):
        reason = _reason(spec, each) or ("" if asked or device != "cpu" else _slower(spec, each))
        if not reason:
            formats = [(piece.entry.encoding, piece.shape[0]) for piece in each.pieces]
            blocks[each.parameter.name] = _parts(formats, each.parameter.shape[1], device)
        elif each.in_blocks or (asked and each.field in FIELDS):
            decoded[reason].append(each)
    held = "kept in the file's blocks" if blocks or asked else ""
    return BlockPlan(replace(spec, blocks=blocks), held, _decoded(decoded))


def _reason(spec: ModelSpec, stored: _Stored) -> str:
    """Why a parameter is not multiplied as its file has it; "" where it is."""
    role = stored.parameter.role
    if stored.field not in FIELDS:
        return f"{'experts are' if role is Role.EXPERTS else f'{stored.field} is'} not multiplied in blocks"
    others = {piece.entry.encoding for piece in stored.pieces} - BLOCK_FORMATS.keys()
    if others:
        return f"{', '.join(sorted(others))} is not multiplied as it is"
    moved = (each.transposed or each.offset or each.paired or each.logarithm or each.normed for each in stored.pieces)
    if any(moved):
        return "what changes as it is loaded is not multiplied as it is"
    return "a table that is scaled is not multiplied as it is" if role is Role.EMBEDDING and _is_scaled(spec) else ""


def _slower(spec: ModelSpec, stored: _Stored) -> str:
    """Why blocks that a CPU multiplies become numbers unasked: those that are not packed are unpacked in each product,
    which takes several times as long. Of a table that is looked up alone rows are unpacked, which takes nothing.
    """
    if stored.parameter.role is Role.EMBEDDING and not spec.shares_table:
        return ""
    slow = {piece.entry.encoding for piece in stored.pieces if not packs(piece.entry.encoding, piece.shape[0])}
    named = ", ".join(sorted(slow))
    return f"{named} is multiplied slower in blocks on a CPU (--quantization {KEPT} keeps it)" if slow else ""


def _decoded(named: Mapping[str, Sequence[_Stored]]) -> tuple[Decoded, ...]:
    return tuple(
        Decoded(
            reason,
            tuple(each.parameter.name for each in stored),
            sum(piece.entry.num_bytes for each in stored for piece in each.pieces),
            sum(each.parameter.elements for each in stored),
        )
        for reason, stored in named.items()
    )


def _refuse_uncompiled(param: str, asked: str, device: str) -> None:
    reason = cc.refusal("cpu_blocks") if device == "cpu" else None
    if reason is not None:
        raise ConfigError(f"{param} is {asked}, but its kernel {reason}.", param=param)


def _made(spec: ModelSpec, formats: tuple[str, ...], device: str) -> BlockPlan:
    """The layers' matrices in blocks made at load, of the first format that each one's rows fill."""
    blocks: dict[str, tuple[BlockPart, ...]] = {}
    others: dict[str, list[str]] = defaultdict(list)
    for parameter in spec.parameters():
        if parameter.role is not Role.LINEAR or parameter.name.rpartition(".")[2] not in FIELDS:
            continue
        rows, columns = parameter.shape
        fitting = [name for name in formats if columns % BLOCK_FORMATS[name][0] == 0]
        if fitting:
            blocks[parameter.name] = _parts([(fitting[0], rows)], columns, device)
        if not fitting or fitting[0] != formats[0]:
            others[f"in {fitting[0]}" if fitting else "in the model's type"].append(parameter.name)
    why = f"rows fill no blocks of {BLOCK_FORMATS[formats[0]][0]} ({formats[0]})"
    texts = tuple(f"{why}; {held}: {_shown(names)}" for held, names in others.items())
    return BlockPlan(replace(spec, blocks=blocks), "in blocks made at load", others=texts)


def _is_scaled(spec: ModelSpec) -> bool:
    return spec.embedding_multiplier != 1.0 or spec.learned_positions


def _parts(formats: Iterable[tuple[str, int]], columns: int, device: str) -> tuple[BlockPart, ...]:
    """Formats and their rows. Planes of neighbours in one format are one, and so multiplied by one launch."""
    found: list[BlockPart] = []
    for name, rows in formats:
        if device == "cpu":
            found.append(BlockPart(name, rows, block_row_bytes(name, columns)))
            continue
        if found and found[-1].format == name:
            rows += found.pop().rows
        found.append(BlockPart(name, rows, block_row_bytes(name, columns), plane_sizes(name, rows, columns)))
    return tuple(found)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
