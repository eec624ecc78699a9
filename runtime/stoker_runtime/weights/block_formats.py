"""Which matrices rest in GGUF's blocks, in which formats, and how many bytes these take.

Invariants: torch-free and pure, so that the fit arithmetic can use it; decided from headers and shapes alone.
Knows nothing of what was asked for, nor of what a block means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.block_parts import BlockPart
from stoker_runtime.models.parameter import Parameter, Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.entries_apart import brought_apart
from stoker_runtime.weights.routing import Route, Vocabulary, route

KEPT = "gguf"
"""The value of `--quantization` that keeps blocks."""
MADE = {"q8_0": ("Q8_0",), "q4k": ("Q4_K", "Q8_0")}
"""Values of `--isq` that make blocks: the formats, of which a matrix gets the first that its rows fill."""
EMBEDDING_MADE = {"q8_0": "Q8_0"}
"""What each value of `--quantize-embedding` makes of the embedding."""
FIELDS = ("embed", "head", "qkv", "output", "gate_up", "down", "shared_gate_up", "shared_down")
"""The matrices that are multiplied one by one; experts and routers are not."""
BLOCK_COLUMNS = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"), 32),
    **dict.fromkeys(("IQ4_XS", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), 256),
}
"""Columns of a block of each format that is multiplied as it is: those of `stoker_kernels.quant.BLOCK_FORMATS`."""
PACKED, PACKED_ROWS = ("Q8_0", "Q4_0", "Q4_1", "IQ4_NL"), 16
"""What a CPU multiplies packed, in whole groups of so many rows: `stoker_kernels.block_gemm.packs`."""
STEP, TAIL = 256, 64
STEP_BYTES = {
    "Q8_0": (272, 72), "Q4_0": (144, 40), "Q4_1": (160, 48), "Q5_0": (176, 56), "Q5_1": (192, 64), "IQ4_NL": (144, 40),
    "IQ4_XS": (140, 40), "Q2_K": (84, 48), "Q3_K": (116, 72), "Q4_K": (148, 48), "Q5_K": (180, 64), "Q6_K": (212, 72),
}  # fmt: skip
"""Bytes of planes for 256 columns of a row, and for 64 of what is left: `stoker_kernels.quant.plane_sizes` of a row."""

Formats = Mapping[str, list[tuple[str, int]]]
"""By a parameter's name the formats of its pieces, and their rows."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter and its pieces in a file."""

    parameter: Parameter
    pieces: tuple[Route, ...]

    @property
    def field(self) -> str:
        """`qkv` of `layers.3.qkv`."""
        return self.parameter.name.rpartition(".")[2]

    @property
    def formats(self) -> list[tuple[str, int]]:
        """Of each piece, with its rows."""
        return [(piece.entry.encoding, piece.shape[0]) for piece in self.pieces]


def stored(spec: ModelSpec, path: Path) -> list[Stored]:
    """Each parameter of a GGUF file. Raises ModelError for one that is not of this model."""
    routes = route(spec, brought_apart(spec, read_gguf_header(path).tensors), Vocabulary.GGUF)
    return [Stored(parameter, routes[parameter.name]) for parameter in spec.parameters()]


def why_decoded(spec: ModelSpec, each: Stored) -> str:
    """Why a parameter is not multiplied as its file has it; "" where it is."""
    role = each.parameter.role
    if each.field not in FIELDS:
        return f"{'experts are' if role is Role.EXPERTS else f'{each.field} is'} not multiplied in blocks"
    others = {name for name, _ in each.formats} - BLOCK_COLUMNS.keys()
    if others:
        return f"{', '.join(sorted(others))} is not multiplied as it is"
    moved = (it.transposed or it.offset or it.paired or it.logarithm or it.normed for it in each.pieces)
    if any(moved):
        return "what changes as it is loaded is not multiplied as it is"
    return "a table that is scaled is not multiplied as it is" if role is Role.EMBEDDING and _is_scaled(spec) else ""


def why_slower(spec: ModelSpec, each: Stored) -> str:
    """Why blocks that a CPU multiplies become numbers unasked: those that are not packed are unpacked in each product,
    which takes several times as long. Of a table that is looked up alone rows are unpacked, which takes nothing.
    """
    if each.parameter.role is Role.EMBEDDING and not spec.shares_table:
        return ""
    slow = sorted({name for name, rows in each.formats if name not in PACKED or rows % PACKED_ROWS})
    return f"{', '.join(slow)} is multiplied slower in blocks on a CPU (--quantization {KEPT} keeps it)" if slow else ""


def made_formats(spec: ModelSpec, formats: tuple[str, ...]) -> tuple[Formats, Mapping[str, list[str]]]:
    """The layers' matrices that become blocks at load, of the first of `formats` that each one's rows fill; and the
    names of those that become others, or none, by what the log says of them.
    """
    made: dict[str, list[tuple[str, int]]] = {}
    others: dict[str, list[str]] = defaultdict(list)
    for parameter in spec.parameters():
        if parameter.role is not Role.LINEAR or parameter.name.rpartition(".")[2] not in FIELDS:
            continue
        rows, columns = parameter.shape
        fitting = [name for name in formats if columns % BLOCK_COLUMNS[name] == 0]
        if fitting:
            made[parameter.name] = [(fitting[0], rows)]
        if not fitting or fitting[0] != formats[0]:
            others[f"in {fitting[0]}" if fitting else "in the model's type"].append(parameter.name)
    return made, others


def embedding_format(spec: ModelSpec, name: str) -> Formats:
    """The embedding to become blocks of `name` at load.

    Raises ConfigError for rows that fill no blocks, and for a table that blocks cannot be looked up in.
    """
    problems = (
        (spec.part is not None, "several ranks share the table, and blocks are not shared"),
        (_is_scaled(spec), f"{spec.architecture} scales its table, or adds positions to it"),
        (spec.hidden % BLOCK_COLUMNS[name] > 0, f"rows of {spec.hidden} fill no blocks of {BLOCK_COLUMNS[name]}"),
    )
    for holds, problem in problems:
        if holds:
            raise ConfigError(
                f"quantize_embedding is {name.lower()}, but {problem}; leave --quantize-embedding out.",
                param="quantize_embedding",
            )
    return {"embed": [(name, spec.vocab_rows)]}


def in_planes(spec: ModelSpec, formats: Formats) -> ModelSpec:
    """The spec with these matrices in planes, as far as their bytes go."""

    def parts(pieces: list[tuple[str, int]], columns: int) -> tuple[BlockPart, ...]:
        return tuple(BlockPart(kind, rows, plane_bytes(kind, columns)) for kind, rows in pieces)

    return in_blocks(spec, formats, parts)


def in_blocks(
    spec: ModelSpec, formats: Formats, parts: Callable[[list[tuple[str, int]], int], tuple[BlockPart, ...]]
) -> ModelSpec:
    """The spec with these matrices in blocks, too; `parts`: (formats and rows of pieces, columns) → how they rest."""
    columns = {each.name: each.shape[1] for each in spec.parameters() if each.name in formats}
    more = {name: parts(pieces, columns[name]) for name, pieces in formats.items()}
    return replace(spec, blocks={**spec.blocks, **more})


def plane_bytes(name: str, columns: int) -> int:
    """Bytes of a row of so many columns in planes."""
    step, tail = STEP_BYTES[name]
    return columns // STEP * step + -(-(columns % STEP) // TAIL) * tail


def _is_scaled(spec: ModelSpec) -> bool:
    return spec.embedding_multiplier != 1.0 or spec.learned_positions
