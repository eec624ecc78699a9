"""Which matrices of a GGUF file stay in its blocks: those whose formats are multiplied as they are.

Where nobody asks, those stay that a processor multiplies faster in blocks than in bf16.
Invariants: decided from headers, before memory is taken; what is decoded instead is named with its format.
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
from stoker_kernels.quant import BLOCK_FORMATS, block_row_bytes
from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.block_parts import BlockPart
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import Route, Vocabulary, route

KEPT = "gguf"
"""The value of `--quantization` that keeps blocks."""
FIELDS = ("embed", "head", "qkv", "output", "gate_up", "down", "shared_gate_up", "shared_down")
"""The matrices that are multiplied one by one; experts and routers are not."""
SHOWN = 4

log = logging.getLogger(__name__)


def keeps_unasked(config: EngineConfig, spec: ModelSpec, device: str) -> bool:
    """Whether the fast formats stay in blocks though no flag says so: for a model in bf16 on a CPU that packs them."""
    plain = config.quantization == "auto" and config.isq == "none" and config.quantize_head == "none"
    plain = plain and not config.batch_invariant  # which blocks are not
    in_bf16 = config.dtype == "bfloat16" or (config.dtype == "auto" and spec.dtype == "bfloat16")
    return plain and in_bf16 and device == "cpu" and spec.part is None and packing_refusal() is None


def keep_blocks(spec: ModelSpec, source: ModelSource, asked: str, device: str, *, unasked: bool = False) -> ModelSpec:
    """The spec with the parts of each matrix that stays in blocks; as it is unless `asked` is "gguf".

    `unasked`: those of a GGUF file stay so that are packed for the processor, whatever was asked. On a GPU nothing
    stays so, which the log says. Raises ConfigError for a model that is no GGUF file, and for one that several ranks
    share.
    """
    if unasked and source.kind is SourceKind.GGUF and source.path is not None:
        return _planned(spec, source.path, _is_packed, asked=False)
    if asked != KEPT:
        return spec
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
    if device != "cpu":
        log.info("weights: GGUF's blocks are multiplied on CPUs only; on this device they become the model's type")
        return spec
    reason = cc.refusal("cpu_blocks")
    if reason is not None:
        raise ConfigError(f"quantization is {KEPT}, but its kernel {reason}.", param="quantization")
    return _planned(spec, source.path, _stays, asked=True)


def _planned(spec: ModelSpec, path: Path, stays: Callable[[Route], bool], *, asked: bool) -> ModelSpec:
    routes = route(spec, read_gguf_header(path).tensors, Vocabulary.GGUF)
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
            blocks[parameter.name] = _parts(pieces, parameter.shape[1])
    if blocks or asked:
        _announce(blocks.values(), decoded, logging.WARNING if asked else logging.INFO)
    return replace(spec, blocks=blocks)


def _stays(piece: Route) -> bool:
    return piece.entry.encoding in BLOCK_FORMATS and not (piece.transposed or piece.offset)


def _is_packed(piece: Route) -> bool:
    return _stays(piece) and packs(piece.entry.encoding, piece.shape[0])


def _is_scaled(spec: ModelSpec) -> bool:
    return spec.embedding_multiplier != 1.0 or spec.learned_positions


def _parts(pieces: Iterable[Route], columns: int) -> tuple[BlockPart, ...]:
    formats = ((piece.entry.encoding, piece.shape[0]) for piece in pieces)
    return tuple(BlockPart(name, rows, block_row_bytes(name, columns)) for name, rows in formats)


def _announce(blocks: Iterable[tuple[BlockPart, ...]], decoded: dict[str, list[str]], level: int) -> None:
    sizes: dict[str, int] = defaultdict(int)
    for parts in blocks:
        for part in parts:
            sizes[part.format] += part.num_bytes
    held = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sorted(sizes.items()))
    log.info("weights: kept in the file's blocks: %s", held or "none")
    for name, parameters in decoded.items():
        more = f" and {len(parameters) - SHOWN} more" if len(parameters) > SHOWN else ""
        log.log(
            level,
            "weights: %s is not multiplied as it is; decoded to the model's type: %s%s",
            name, ", ".join(parameters[:SHOWN]), more,
        )  # fmt: skip
