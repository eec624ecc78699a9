"""Which matrices rest in GGUF's blocks: those of a file whose formats are multiplied as they are, or what in-situ
quantization makes of 16 bits.

On a CPU blocks rest as a file has them, on a GPU in planes; the spec counts either. Where nobody asks, those of a file
stay that a processor multiplies faster in blocks than decoded.
Invariants: decided from headers and shapes, before memory is taken; what is not in blocks is named with its reason.
Knows nothing of how blocks are multiplied.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from stoker_kernels.block_gemm import packing_refusal, packs
from stoker_kernels.launch import cc
from stoker_kernels.quant import BLOCK_FORMATS, block_row_bytes, plane_sizes
from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.block_parts import BlockPart
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.gguf_entries import brought_apart
from stoker_runtime.weights.routing import Route, Vocabulary, route

KEPT = "gguf"
"""The value of `--quantization` that keeps blocks."""
MADE = {"q8_0": ("Q8_0",), "q4k": ("Q4_K", "Q8_0")}
"""Values of `--isq` that make blocks: the formats, of which a matrix gets the first that its rows fill."""
FIELDS = ("embed", "head", "qkv", "output", "gate_up", "down", "shared_gate_up", "shared_down")
"""The matrices that are multiplied one by one; experts and routers are not."""
SHOWN = 4

log = logging.getLogger(__name__)


def keeps_unasked(config: EngineConfig, spec: ModelSpec, device: str) -> bool:
    """Whether the fast formats stay in blocks though no flag says so: on a CPU, which packs them."""
    plain = config.quantization == "auto" and config.isq == "none" and config.quantize_head == "none"
    plain = plain and not config.batch_invariant  # which blocks are not
    return plain and device == "cpu" and spec.part is None and packing_refusal() is None


def keep_blocks(spec: ModelSpec, source: ModelSource, asked: str, device: str, *, unasked: bool = False) -> ModelSpec:
    """The spec with the parts of each matrix that is in blocks on `device` ("cpu" or "cuda"); as it is unless `asked`
    is "gguf" or a value of MADE.

    `unasked`: those of a GGUF file stay so that are packed for the processor, whatever was asked. Raises ConfigError
    for a model that is no GGUF file, and for blocks of a file that several ranks share.
    """
    if unasked and source.kind is SourceKind.GGUF and source.path is not None:
        return _planned(spec, source.path, _is_packed, device, asked=False)
    if asked != KEPT and asked not in MADE:
        return spec
    if asked in MADE:
        _refuse_uncompiled("isq", asked, device)
        return _made(spec, MADE[asked], device)
    if source.kind is not SourceKind.GGUF or source.path is None:
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
    return _planned(spec, source.path, _stays, device, asked=True)


def _planned(spec: ModelSpec, path: Path, stays: Callable[[Route], bool], device: str, *, asked: bool) -> ModelSpec:
    routes = route(spec, brought_apart(spec, read_gguf_header(path).tensors), Vocabulary.GGUF)
    blocks: dict[str, tuple[BlockPart, ...]] = {}
    decoded: dict[str, list[str]] = defaultdict(list)
    for parameter in spec.parameters():
        if parameter.name.rpartition(".")[2] not in FIELDS:
            continue
        pieces = routes[parameter.name]
        others = {piece.entry.encoding for piece in pieces if not stays(piece)}
        if others or (parameter.role is Role.EMBEDDING and _is_scaled(spec)):
            decoded[", ".join(sorted(others)) or "a table that is scaled"].append(parameter.name)
        else:
            formats = [(piece.entry.encoding, piece.shape[0]) for piece in pieces]
            blocks[parameter.name] = _parts(formats, parameter.shape[1], device)
    if blocks or asked:
        _announce("kept in the file's blocks", blocks.values())
        level = logging.WARNING if asked else logging.INFO
        _name("is not multiplied as it is; decoded to the model's type", decoded, level)
    return replace(spec, blocks=blocks)


def _refuse_uncompiled(param: str, asked: str, device: str) -> None:
    reason = cc.refusal("cpu_blocks") if device == "cpu" else None
    if reason is not None:
        raise ConfigError(f"{param} is {asked}, but its kernel {reason}.", param=param)


def _made(spec: ModelSpec, formats: tuple[str, ...], device: str) -> ModelSpec:
    """The spec whose layers' matrices are in blocks made at load, of the first format that each one's rows fill."""
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
    _announce("in blocks made at load", blocks.values())
    width = BLOCK_FORMATS[formats[0]][0]
    for held, names in others.items():
        _name(f"rows fill no blocks of {width} ({formats[0]}); {held}", {"": names}, logging.WARNING)
    return replace(spec, blocks=blocks)


def _stays(piece: Route) -> bool:
    return piece.entry.encoding in BLOCK_FORMATS and not (piece.transposed or piece.offset)


def _is_packed(piece: Route) -> bool:
    return _stays(piece) and packs(piece.entry.encoding, piece.shape[0])


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


def _announce(what: str, blocks: Iterable[tuple[BlockPart, ...]]) -> None:
    sizes: dict[str, int] = defaultdict(int)
    for parts in blocks:
        for part in parts:
            sizes[part.format] += part.num_bytes
    held = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sorted(sizes.items()))
    log.info("weights: %s: %s", what, held or "none")


def _name(what: str, named: dict[str, list[str]], level: int) -> None:
    """Parameters by the reason that they share."""
    for name, parameters in named.items():
        more = f" and {len(parameters) - SHOWN} more" if len(parameters) > SHOWN else ""
        log.log(level, "weights: %s: %s%s", f"{name} {what}".strip(), ", ".join(parameters[:SHOWN]), more)
