"""Products of many tokens with GGUF's planes on Hopper: host side of csrc/sm90_blocks_wide.cu.

Weights are decoded in registers on their way to wgmma, once for each tile of tokens; no memory has them in 16 bits.

Invariants: a weight is what its format defines, rounded once to bf16, as `sm90_rows` decodes it; products are summed in
fp32, in a fixed order, so equal calls give equal bits, and the result is rounded once. A launch never synchronises and
can be captured after one of its kind; beside its result it takes at most the sums of a tile for each SM (`PART_BYTES`).
Does not know: which layer it serves, nor which products come here (`plane_choose`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import HOPPER_SHARED, chip_of
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.quant import PLANE_KINDS, STEP, PlaneRows

STEM, ARCH = "sm90_blocks_wide", "sm_90a"
FORMATS = tuple(PLANE_KINDS)
ROW_MULTIPLE = 4  # rows whose scales and factors begin on multiples of 16 bytes
MAX_SPLIT = 8  # CTAs of a portable cluster
MOST_STAGES = 4
HALF = STEP // 2  # columns of a stage
RANGES = 0  # in place of a split: CTAs have equal ranges of the half steps of all tiles
PART_BYTES = 256 * 128 * 4  # of a tile's sums, at most
MOST_CTAS = 1024  # of any GPU that CTAs fill one by one
# A launch's start and end, adding up in a cluster, a KB of sums, and adding a part of another range: the order of
# choices is what they are for.
START_US, CLUSTER_US, CLUSTER_US_PER_KB, PART_US = 2.5, 1.0, 0.035, 3.5


class WideBlockArguments(ctypes.Structure):
    """WideBlockArguments of csrc/wide_ring.cuh."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_void_p * 2),
        ("factor", ctypes.c_void_p * 2),
        ("parts", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("m", "n", "steps", "ld_out", "split", "pair", "gated", "count")),
        ("first", ctypes.c_int * 2),
    ]


@dataclass(frozen=True, slots=True)
class WideTile:
    """One compiled kernel of a format: `tokens` tokens and `rows` rows of the weight a CTA, one of an SM.

    `groups` warpgroups multiply. `half_us`: what half a step of columns takes where every SM is busy. `pairs`: where no
    columns are shared, two CTAs of neighbouring rows may share x.
    """

    tokens: int
    rows: int
    groups: int
    half_us: float
    pairs: bool = False

    def cluster(self, split: int) -> int:
        """CTAs of a cluster."""
        return split if split > 1 else 2 if self.pairs and SHARES_X else 1

    @property
    def wants_ranges(self) -> bool:
        """Whether its tiles seldom fill whole waves."""
        return self.groups == 3

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 128 * (self.groups + 1)

    @property
    def x_stages(self) -> int:
        """Of 64 columns of x; X_STAGES of csrc/wide_ring.cuh."""
        return 5 if self.tokens > 128 else 6

    def stage_bytes(self, name: str) -> int:
        """Of half a step of planes: a plane of 32 bytes a step comes whole."""
        kind = PLANE_KINDS[name]
        high = kind.high * 32
        words = 2 if kind.mins and not kind.nibbles else 1
        row = kind.low * 16 + (high // 2 if high > 32 else high) + 8 * words + 4 * kind.bytes_
        return -(-row * self.rows // 1024) * 1024

    def tables_bytes(self, name: str) -> int:
        """Of scales as numbers, of 16 rows and half a step twice a warp, where they are bytes in planes."""
        kind = PLANE_KINDS[name]
        return 4 * self.groups * 2 * HALF // kind.words * 16 * 8 if kind.bytes_ else 0

    def stages(self, name: str) -> int:
        """Of planes; STAGES of csrc/wide_ring.cuh."""
        free = HOPPER_SHARED - 1024 - self.x_stages * (self.tokens * 128 + 16) - 16 * MOST_STAGES
        free -= self.tables_bytes(name)
        return min(MOST_STAGES, free // self.stage_bytes(name))

    def shared_bytes(self, name: str) -> int:
        """Dynamic shared memory: alignment, rings, two barriers a stage."""
        x, planes = self.tokens * 128 + 16, self.stage_bytes(name) + 16
        return 1024 + self.x_stages * x + self.stages(name) * planes + self.tables_bytes(name)


TILES = (
    WideTile(64, 256, 4, 1.4), WideTile(128, 192, 3, 1.2), WideTile(128, 256, 2, 1.75),
    WideTile(256, 128, 2, 1.45, True),
)  # fmt: skip
# What is chosen, by what a step of Llama-3.1-8B took on an H200: up to 128 tokens ranges too, and tiles of 192 rows;
# beyond them whole tiles and clusters alone, without pairs (256 tokens: 9.6 ms, and 10.1 with all of it).
RANGES_TO, SHARES_X = 128, False


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a piece from `first` on."""

    piece: PlaneRows
    first: int = 0


Residents = Callable[[WideTile, int], int]
"""(tile, CTAs of a cluster) → how many such clusters the device holds at once."""


def device_refusal(dtype: torch.dtype, sm: int) -> str | None:
    """None where the kernels run, else why not."""
    if not chip_of(sm).wgmma or dtype != torch.bfloat16:
        return "needs sm_90 and bfloat16"
    return cuda.missing_cubin(STEM, ARCH)


def piece_refusal(piece: PlaneRows) -> str | None:
    """None where the kernels read a piece's planes, else why not."""
    if piece.format not in FORMATS:
        return f"takes {', '.join(FORMATS)}, not {piece.format}"
    if piece.columns % STEP or piece.rows % ROW_MULTIPLE:
        return f"takes multiples of {ROW_MULTIPLE} rows and {STEP} columns"
    planes = (piece.low, piece.high, piece.scale, piece.factor)
    misplaced = any(cuda.address_of(tensor) % 16 for tensor in planes)
    return "planes have to start on multiples of 16 bytes" if misplaced else None


def refusal(x: Tensor, pieces: tuple[PlaneRows, ...], bias: Tensor | None, out: Tensor) -> str | None:
    """None where the kernels multiply x [M, K] with all pieces, else why not."""
    if {x.dtype, out.dtype, x.dtype if bias is None else bias.dtype} != {torch.bfloat16}:
        return "takes bfloat16 throughout"
    if x.stride(1) != 1 or out.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "rows of x have to be contiguous and start on multiples of 16 bytes"
    if out.stride(0) % 2 or out.data_ptr() % 4:
        return "rows of the result have to start on multiples of 4 bytes"
    missing = device_refusal(x.dtype, sm_of(x.device))
    return missing or next((reason for each in pieces if (reason := piece_refusal(each))), None)


def gated_spans(pieces: tuple[PlaneRows, ...]) -> tuple[Span, Span] | None:
    """Where rows of gate and as many of up lie, in pieces of one format and number of rows; None where they do not."""
    if len(pieces) == 1 and pieces[0].rows % (2 * ROW_MULTIPLE) == 0:
        return Span(pieces[0]), Span(pieces[0], pieces[0].rows // 2)
    if len(pieces) == 2 and pieces[0].format == pieces[1].format and pieces[0].rows == pieces[1].rows:
        return Span(pieces[0]), Span(pieces[1])
    return None


def cost_us(tile: WideTile, split: int, tokens: int, rows: int, halves: int, resident: int) -> float:
    """What a product takes by waves of clusters, or ranges, by half steps, starts and sums."""
    wide = tile.rows * tile.cluster(split) // max(1, split)
    tiles = -(-rows // wide) * -(-tokens // tile.tokens)
    part_kb = tile.rows * tile.tokens * 4 / 1024
    if split == RANGES:
        each = -(-tiles * halves // max(1, resident))
        parts = 0 if each % halves == 0 else -(-halves // each)
        return each * tile.half_us + START_US + parts * PART_US * part_kb / 128
    waves = -(-tiles // max(1, resident))
    cluster = CLUSTER_US + CLUSTER_US_PER_KB * part_kb if split > 1 else 0.0
    return waves * (-(-halves // split) * tile.half_us + START_US + cluster)


def choice_for(tokens: int, rows: int, halves: int, residents: Residents) -> tuple[WideTile, int]:
    """The kernel, and how many CTAs share the columns, or RANGES: what takes least."""
    few = tokens <= RANGES_TO
    splits = (*range(1, min(MAX_SPLIT, halves) + 1), *((RANGES,) if few else ()))
    choices = [(tile, split) for tile in TILES if few or not tile.wants_ranges for split in splits]

    def cost(choice: tuple[WideTile, int]) -> float:
        tile, split = choice
        return cost_us(tile, split, tokens, rows, halves, residents(tile, split))

    return min(choices, key=cost)


def linear(
    x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor, *, tile: WideTile | None = None, split: int = 0
) -> None:
    """out [M, N] = x · Wᵀ + bias on the current stream, for operands that `refusal` accepts.

    `tile` and `split` (1 to 8, of which half steps allow as many as they are, or RANGES) are chosen where no tile is
    given. Raises CubinMissing.
    """
    _multiply(x, (Span(piece), Span(piece)), bias, out, False, tile, split)


def silu_mul(x: Tensor, gate: Span, up: Span, out: Tensor, *, tile: WideTile | None = None, split: int = 0) -> None:
    """out [M, F] = silu(x · gateᵀ) · (x · upᵀ), of spans that `gated_spans` found. Otherwise as `linear`."""
    _multiply(x, (gate, up), None, out, True, tile, split)


def _multiply(
    x: Tensor, spans: tuple[Span, Span], bias: Tensor | None, out: Tensor, gated: bool, tile: WideTile | None,
    split: int,
) -> None:  # fmt: skip
    piece, device, count = spans[0].piece, x.device, out.shape[1]
    if tile is None:
        most = TILES[-1].tokens  # more are whole tiles: the same choice, which is made once
        tokens = len(x) if len(x) <= most else -(-len(x) // most) * most
        tile, split = _choice(tokens, count * (2 if gated else 1), 2 * piece.columns // STEP, piece.format, device)
    half, halves = tile.rows // 2, 2 * piece.columns // STEP
    split = min(split, halves)
    cluster, clusters = tile.cluster(split), _clusters(tile, tile.cluster(split), piece.format, device)
    pair = int(split <= 1 and cluster == 2)
    tiles = -(-count // ((half if gated else tile.rows) << pair)) * -(-len(x) // tile.tokens)
    if split == RANGES:
        clusters = min(clusters, tiles * halves)
        parts = torch.empty(clusters * cluster * tile.rows * tile.tokens, dtype=torch.float32, device=device)
        done: Tensor | None = _done(device)
    else:
        clusters, parts, done = tiles if split > 1 else min(clusters, tiles), None, None
    begins = [span.first + (0 if gated else half * at) for at, span in enumerate(spans)]
    arguments = WideBlockArguments(
        out.data_ptr(), cuda.address_of(bias),
        (ctypes.c_void_p * 2)(*(span.piece.scale.data_ptr() for span in spans)),
        (ctypes.c_void_p * 2)(*(cuda.address_of(span.piece.factor) for span in spans)),
        cuda.address_of(parts), cuda.address_of(done), len(x), piece.rows, piece.columns // STEP, out.stride(0),
        max(1, split), pair, gated, count, (ctypes.c_int * 2)(*begins),
    )  # fmt: skip
    maps = [cuda.tensor_map(x, tile.tokens >> pair), _plane_maps(spans, tile)]
    chosen = _kernel(tile, piece.format, device, pairs=pair == 1)
    cuda.launch(chosen, clusters * cluster, [*maps, arguments], device, pdl=pdl_on(device), cluster=cluster)


@functools.cache
def _done(device: torch.device) -> Tensor:
    """Whether a range's part is there: zeros between launches."""
    return torch.zeros(MOST_CTAS, dtype=torch.int32, device=device)


def _kernel(tile: WideTile, name: str, device: torch.device, *, pairs: bool = False) -> cuda.Kernel:
    entry = f"{STEM}_{name.lower()}_m{tile.tokens}_r{tile.rows}{'_pairs' if pairs else ''}"
    return cuda.kernel(STEM, ARCH, entry, tile.shared_bytes(name), tile.threads, device.index or 0)


@functools.cache
def _clusters(tile: WideTile, size: int, name: str, device: torch.device) -> int:
    """Clusters of so many CTAs that the device holds at once."""
    if size == 1:
        return sm_count(device)
    return cuda.resident_clusters(_kernel(tile, name, device), size, tile.shared_bytes(name))


@functools.cache
def _choice(tokens: int, rows: int, halves: int, name: str, device: torch.device) -> tuple[WideTile, int]:
    def residents(tile: WideTile, split: int) -> int:
        return _clusters(tile, tile.cluster(split), name, device)

    return choice_for(tokens, rows, halves, residents)


def _plane_maps(spans: tuple[Span, Span], tile: WideTile) -> ctypes.Array[ctypes.c_char]:
    """PlaneMaps of csrc/wide_ring.cuh."""
    places = []
    for plane in ("low", "high"):
        for span in spans:
            tensor: Tensor | None = getattr(span.piece, plane)
            places.append((0, 0) if tensor is None else (tensor.data_ptr(), tensor.shape[1]))
    piece = spans[0].piece
    return _plane_maps_at(piece.format, piece.rows, tuple(places), tile.rows // 2)


@functools.cache
def _plane_maps_at(
    name: str, rows: int, places: tuple[tuple[int, int], ...], box_rows: int
) -> ctypes.Array[ctypes.c_char]:
    kind = PLANE_KINDS[name]
    lines = [kind.low * 16] * 2 + [max(32, kind.high * 16)] * 2
    maps: list[Any] = [
        cuda.lines_map_at(address, rows, row_bytes, line, box_rows) if address else None
        for (address, row_bytes), line in zip(places, lines, strict=True)
    ]
    size = ctypes.sizeof(maps[0])
    image = b"".join(bytes(size) if each is None else bytes(each) for each in maps)
    storage = (ctypes.c_char * (len(image) + 64))()
    placed = (ctypes.c_char * len(image)).from_buffer(storage, -ctypes.addressof(storage) % 64)
    ctypes.memmove(placed, image, len(image))
    return placed
