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
from functools import partial
from pathlib import Path

from stoker_kernels.block_gemm import packing_refusal
from stoker_kernels.launch import cc
from stoker_kernels.quant import BLOCK_FORMATS, block_row_bytes, plane_sizes
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.block_parts import BlockPart
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.quantization.fp4_scheme import EXPERTS_KIND
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.block_formats import (
    EMBEDDING_MADE,
    FIELDS,
    KEPT,
    MADE,
    Stored,
    embedding_format,
    in_blocks,
    made_formats,
    stored,
    why_decoded,
    why_slower,
)
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES

UNASKED = ("auto", "none")
"""Those with which it is decided here what a file's blocks become."""
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
    spec: ModelSpec, source: ModelSource, asked: str, device: str, *, refused: str = "", whole: ModelSpec | None = None,
    embedding: str = "none",
) -> BlockPlan:
    """What rests in blocks on `device` ("cpu" or "cuda"): of a GGUF file where `asked` is "gguf", "auto" or "none", or
    made at load where it is a value of MADE; and the embedding, where `embedding` is a value of EMBEDDING_MADE.

    `refused` is why no blocks of a file stay that nobody asked to (`decoding_reason`); `whole` is the model that `spec`
    is a rank's part of. Raises ConfigError, where blocks are asked for, for a model that is no GGUF file, for blocks of
    a file that several ranks share, and for an embedding that cannot be made so.
    """
    if embedding == "none":
        return _kept_or_made(spec, source, asked, device, refused, whole, frozenset())
    plan = _kept_or_made(spec, source, asked, device, refused, whole, frozenset({"embed"}))
    return _with_embedding(plan, EMBEDDING_MADE[embedding], device)


def _with_embedding(plan: BlockPlan, name: str, device: str) -> BlockPlan:
    _refuse_uncompiled("quantize_embedding", name.lower(), device)
    spec = in_blocks(plan.spec, embedding_format(plan.spec, name), partial(_parts, device=device))
    held = f"{plan.held}, and the embedding in {name}" if plan.held else f"the embedding in {name}"
    return replace(plan, spec=replace(spec, made=spec.made | {"embed"}), held=held)


def _kept_or_made(
    spec: ModelSpec, source: ModelSource, asked: str, device: str, refused: str, whole: ModelSpec | None,
    others: frozenset[str],
) -> BlockPlan:
    """The plan of all but `others`, names of what becomes something else."""
    path = source.path if source.kind is SourceKind.GGUF else None
    if asked in MADE:
        _refuse_uncompiled("isq", asked, device)
        return _made(spec, MADE[asked], device)
    if asked in UNASKED and path is not None:
        reason = f"--quantization {asked} was given" if asked == "none" else refused
        if reason:
            return _all_decoded(spec, whole or spec, path, reason, others, wanted=asked == "none")
        return _planned(spec, path, device, others, asked=False)
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
    return _planned(spec, path, device, others, asked=True)


def _is_in_blocks(each: Stored) -> bool:
    """Whether any of it is in blocks that become the model's type unless they are kept."""
    return each.parameter.kind != EXPERTS_KIND and any(name not in PLAIN_DTYPES for name, _ in each.formats)


def _all_decoded(
    spec: ModelSpec, whole: ModelSpec, path: Path, reason: str, others: frozenset[str], *, wanted: bool
) -> BlockPlan:
    named = [each for each in stored(whole, path) if _is_in_blocks(each) and each.parameter.name not in others]
    return BlockPlan(spec, decoded=_decoded({reason: named} if named else {}), wanted=wanted)


def _planned(spec: ModelSpec, path: Path, device: str, others: frozenset[str], *, asked: bool) -> BlockPlan:
    kept: dict[str, list[tuple[str, int]]] = {}
    decoded: dict[str, list[Stored]] = defaultdict(list)
    for each in stored(spec, path):
        if each.parameter.name in others:
            continue
        reason = why_decoded(spec, each) or ("" if asked or device != "cpu" else why_slower(spec, each))
        if not reason:
            kept[each.parameter.name] = each.formats
        elif _is_in_blocks(each) or (asked and each.field in FIELDS):
            decoded[reason].append(each)
    spec = in_blocks(spec, kept, partial(_parts, device=device))
    held = "kept in the file's blocks" if kept or asked else ""
    return BlockPlan(spec, held, _decoded(decoded))


def _decoded(named: Mapping[str, Sequence[Stored]]) -> tuple[Decoded, ...]:
    return tuple(
        Decoded(
            reason,
            tuple(each.parameter.name for each in group),
            sum(piece.entry.num_bytes for each in group for piece in each.pieces),
            sum(each.parameter.elements for each in group),
        )
        for reason, group in named.items()
    )


def _refuse_uncompiled(param: str, asked: str, device: str) -> None:
    reason = cc.refusal("cpu_blocks") if device == "cpu" else None
    if reason is not None:
        raise ConfigError(f"{param} is {asked}, but its kernel {reason}.", param=param)


def _made(spec: ModelSpec, formats: tuple[str, ...], device: str) -> BlockPlan:
    """The layers' matrices in blocks made at load, of the first format that each one's rows fill."""
    made, others = made_formats(spec, formats)
    why = f"rows fill no blocks of {BLOCK_FORMATS[formats[0]][0]} ({formats[0]})"
    texts = tuple(f"{why}; {held}: {_shown(names)}" for held, names in others.items())
    spec = replace(in_blocks(spec, made, partial(_parts, device=device)), made=frozenset(made))
    return BlockPlan(spec, "in blocks made at load", others=texts)


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
