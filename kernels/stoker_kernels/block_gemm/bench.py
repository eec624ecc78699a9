"""Checks and times products with GGUF's blocks in planes on a GPU: `python -m stoker_kernels.block_gemm.bench`.

Correctness first: random shapes of every format, every tile and some splits, against fp64 of the values that the
reference decodes, and decoded rows bit for bit. Then the four weights of a layer of 8B in turn, each launch begun while
the one before runs, as in a step, beside the time of their bytes and that of BF16 weights of the same shapes; gate and
up with their activation, and rows decoded alone. With `--sweep` all of it once more for each value of what was chosen
by a prediction (about a minute). Without, the weights of Q4_K_M one by one, cold (as many copies as exceed the L2 take
turns), with `--tiles` by every tile and split.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from stoker_kernels.block_gemm import decoded, plane_choose, plane_launch, sm90_few, sm90_rows
from stoker_kernels.block_gemm.op import block_linear
from stoker_kernels.block_gemm.plane_choose import by_rows
from stoker_kernels.block_gemm.plane_launch import TILES
from stoker_kernels.block_gemm.reference import decode_planes
from stoker_kernels.launch.dispatch import ops, select, sm_of
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.quant import (
    BLOCK_FORMATS,
    PLANE_KINDS,
    STEP,
    BlockWeight,
    LinearWeight,
    PlaneRows,
    place_planes,
    plane_sizes,
    steps_and_tails,
)

BANDWIDTH = 4.33e12  # bytes a second that a read of an H200 reaches
COLD_BYTES = 200e6  # several times the L2
IN_A_GRAPH = 8
# Llama-3.1-8B in Q4_K_M: queries and keys, values, output, gate and up, down in either type; and in eight bits.
LAYER = (
    ("Q4_K", 5120, 4096), ("Q6_K", 1024, 4096), ("Q4_K", 4096, 4096), ("Q4_K", 28672, 4096), ("Q4_K", 4096, 14336),
    ("Q6_K", 4096, 14336), ("Q6_K", 128256, 4096), ("Q8_0", 28672, 4096), ("Q4_0", 28672, 4096),
)  # fmt: skip
# All of a layer in one format: queries, keys and values, output, gate and up, down.
CHAIN = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
CHAINED = ("Q4_K", "Q6_K", "Q8_0", "Q5_K", "IQ4_XS")
TOKENS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
GATE_UP = 2  # of CHAIN
# What was chosen by a prediction: the module, its constant, other values, and the tokens that it matters for.
CHOICES = (
    (sm90_few, "FILLED", (1,), range(1, 65)),
    (sm90_few, "MOST_TOKENS", (32,), range(33, 65)),  # what Triton takes instead
    (decoded, "DECODED_FROM", (33,), range(33, 65)),
    (plane_choose, "WIDE_FROM", (17, 65), range(17, 65)),
    (plane_choose, "WIDE_TO", (64, 4096), range(65, 4097)),  # rows decoded before, and within the product
    (decoded, "SCRATCH_BYTES", (32 << 20, 64 << 20, 256 << 20), range(1025, 4097)),
)
PART_STEPS = (1, 2, 8, 16)  # other values of that of `sm90_rows`


@dataclass(frozen=True, slots=True)
class Row:
    """One product: its time in µs, that of its bytes, and that of a BF16 weight where it was taken.

    `how`: what was not the op's choice.
    """

    format: str
    n: int
    k: int
    tokens: int
    how: str
    us: float
    limit_us: float
    bf16_us: float | None = None


def random_piece(name: str, n: int, k: int, device: torch.device) -> PlaneRows:
    """Random bits in all codes and scales; the fp16 numbers small and finite."""
    kind = PLANE_KINDS[name]
    storage = torch.randint(0, 256, (sum(plane_sizes(name, n, k)),), dtype=torch.uint8, device=device)
    piece = place_planes(name, n, k, storage)
    halves = piece.scale if piece.factor is None else piece.factor
    numbers = torch.rand(halves.nbytes // 2, device=device) + 0.5
    size = 127 if kind.levels else 1 << kind.low + kind.high
    size *= 32 if kind.bytes_ else 1
    halves.view(torch.float16).view(-1).copy_(numbers * (4.0 / (size * k**0.5)))
    if piece.factor is None:  # a tail has each block's scale twice
        steps, _ = steps_and_tails(k)
        tails = piece.scale[n * steps * kind.scale_words :].view(torch.float16).view(-1, 2)
        tails[:, 1] = tails[:, 0]
    return piece


def error(got: Tensor, x: Tensor, piece: PlaneRows) -> float:
    """‖got − exact‖ / ‖exact‖ of one product; NaN never passes a comparison."""
    exact = x.double() @ decode_planes(piece).double().t()
    return float((got.double() - exact).norm() / exact.norm())


def check(device: torch.device, cases: int, seed: int) -> list[str]:
    """Random products through every tile, and rows; what is wrong, if anything."""
    draw, complaints = random.Random(seed), []
    for case in range(cases):
        name = list(PLANE_KINDS)[case % len(PLANE_KINDS)]
        width = BLOCK_FORMATS[name][0]
        n, k = 8 * draw.randrange(1, 400), width * draw.randrange(1, 12 if width == 256 else 90)
        piece, tokens = random_piece(name, n, k, device), draw.choice([1, 3, 8, 13, 29, 64, 100, 256, 300])
        rows = torch.empty(n, k, dtype=torch.bfloat16, device=device)
        plane_launch.rows(piece, rows)
        if not torch.equal(rows, decode_planes(piece).bfloat16()):
            complaints.append(f"{name}: rows of {n} × {k} differ from the reference")
        if sm90_rows.refusal(piece, rows) is None:
            first = draw.randrange(n)
            sm90_rows.decode(piece, rows[first:].fill_(float("nan")), first=first, part_steps=draw.choice([0, 1, 3]))
            if not torch.equal(rows, decode_planes(piece).bfloat16()):
                complaints.append(f"{name}: rows of {n} × {k} from {first} on, decoded in CUDA, differ")
        x = torch.randn(tokens, k, device=device).bfloat16()
        for tile in (None, *TILES):
            out = torch.full((tokens, n), float("nan"), dtype=torch.bfloat16, device=device)
            if tile is None:
                block_linear(x, BlockWeight((piece,), k), out=out)
            else:
                plane_launch.linear(x, piece, None, out, tile=tile, splits=draw.randint(1, max(1, k // 512)))
            found = error(out, x, piece)
            if not found < 4e-3:
                named = "the op" if tile is None else f"{tile.tokens} tokens a tile"
                complaints.append(f"{name}, {named}: {tokens} × {n} × {k}: error {found:.2e}")
    return complaints + check_few(device, cases, draw) + check_gated(device, cases // 4, draw)


def check_few(device: torch.device, cases: int, draw: random.Random) -> list[str]:
    """Random products through the kernels for few tokens, with random splits; what is wrong, if anything."""
    complaints: list[str] = []
    if sm90_few.device_refusal(torch.bfloat16, sm_of(device)) is not None:
        return complaints
    for case in range(cases):
        name = sm90_few.FORMATS[case % len(sm90_few.FORMATS)]
        n, k, tokens = 16 * draw.randrange(1, 700), 256 * draw.randrange(1, 40), draw.randrange(1, 65)
        piece, x = random_piece(name, n, k, device), torch.randn(tokens, k, device=device).bfloat16()
        out = torch.full((tokens, n), float("nan"), dtype=torch.bfloat16, device=device)
        split = draw.choice([0, 8])
        sm90_few.linear(x, piece, None, out, split=split)
        found = error(out, x, piece)
        if not found < 2.5e-3:
            complaints.append(f"{name}, few: {tokens} × {n} × {k}, split {split}: error {found:.2e}")
    return complaints


def check_gated(device: torch.device, cases: int, draw: random.Random) -> list[str]:
    """Gate and up of many tokens with their activation, of pieces in two formats; what is wrong, if anything."""
    complaints = []
    for _ in range(cases):
        names, k = draw.sample(sorted(PLANE_KINDS), 2), 256 * draw.randrange(1, 20)
        rows = [8 * draw.randrange(40, 1500), 8 * draw.randrange(40, 1500)]
        pieces = tuple(random_piece(name, n, k, device) for name, n in zip(names, rows, strict=True))
        x = torch.randn(draw.randrange(65, 600), k, device=device).bfloat16()
        values = torch.cat([decode_planes(piece) for piece in pieces]).bfloat16().double()
        gate, up = (x.double() @ values.t()).chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
        got = _silu_mul(x, BlockWeight(pieces, k))
        found = float((got.double() - exact).norm() / exact.norm())
        if not found < 6e-3:
            complaints.append(f"{names}, gated: {len(x)} × {rows} × {k}: error {found:.2e}")
    return complaints


def timed(run: Callable[[int], object], rounds: int = 24) -> float:
    """Median µs of `run(i)` in a graph of IN_A_GRAPH, over `rounds` replays."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    with torch.cuda.stream(stream):
        run(0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(IN_A_GRAPH):
                run(i)
        for start, end in marks:
            start.record()
            graph.replay()
            end.record()
        stream.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in marks) * 1000 / IN_A_GRAPH


def rows_of(device: torch.device, tokens: tuple[int, ...], sweep: bool) -> Iterator[Row]:
    """Times of the layer's weights."""
    for name, n, k in LAYER:
        size = sum(plane_sizes(name, n, k))
        copies = [random_piece(name, n, k, device) for _ in range(max(2, int(COLD_BYTES / size) + 1))]
        weights = [BlockWeight((piece,), k) for piece in copies]
        for m in tokens:
            x = torch.randn(m, k, device=device).bfloat16()
            out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
            limit = (size + 2 * m * (n + k)) / BANDWIDTH * 1e6
            us = timed(functools.partial(_by_op, x, weights, out))
            yield Row(name, n, k, m, "", us, limit)
            if sweep:
                for how, run in ways(x, copies, out):
                    yield Row(name, n, k, m, how, timed(run, 8), limit)


def ways(x: Tensor, copies: list[PlaneRows], out: Tensor) -> Iterator[tuple[str, Callable[[int], None]]]:
    """Every way to multiply a weight: its name, and the product with copy i."""
    m = len(x)
    for tile in TILES:
        for splits in (1, 2, 4, 8) if m <= 2 * tile.tokens else ():
            yield f"{tile.tokens} tokens, {splits} splits", functools.partial(_by_tile, x, copies, out, tile, splits)
    if sm90_few.refusal(x, copies[0], None, out) is None:
        name, columns = copies[0].format, copies[0].columns
        few = sm90_few.tile_for(name, m, columns)
        for split in range(1, sm90_few.MAX_SPLIT + 1):
            if few.room(name, -(-columns // STEP // split))[1]:
                yield f"few, split {split}", functools.partial(_by_few, x, copies, out, split)
    if m >= 32:
        yield "rows, then cuBLAS", functools.partial(_by_rows, x, copies, out)
        made = torch.empty((copies[0].rows, copies[0].columns), dtype=x.dtype, device=x.device)
        plane_launch.rows(copies[0], made)
        yield "cuBLAS alone", functools.partial(_by_cublas, x, made, out)


@contextlib.contextmanager
def choosing(module: object, name: str, value: int) -> Iterator[None]:
    """Another value of a module's constant meanwhile."""
    before = getattr(module, name)
    try:
        setattr(module, name, value)
        sm90_few._split.cache_clear()
        yield
    finally:
        setattr(module, name, before)
        sm90_few._split.cache_clear()


@dataclass(frozen=True, slots=True)
class Chain:
    """A layer's four products for `m` tokens: x and the result of each, and its weights in blocks and in BF16."""

    name: str
    m: int
    xs: list[Tensor]
    outs: list[Tensor]
    layers: list[list[BlockWeight]]
    dense: list[list[LinearWeight]]

    def blocks(self, i: int) -> None:
        """All four."""
        for x, weight, out in zip(self.xs, self.layers[i % len(self.layers)], self.outs, strict=True):
            block_linear(x, weight, out=out)

    def in_bf16(self, i: int) -> None:
        """The same by weights in 16 bits, as the engine multiplies them."""
        multiply = select("linear", self.xs[0].device, torch.bfloat16)
        for x, weight, out in zip(self.xs, self.dense[i % len(self.dense)], self.outs, strict=True):
            multiply(x, weight, bias=None, out=out)

    def gated(self, i: int) -> None:
        """Gate and up, and their activation."""
        _silu_mul(self.xs[GATE_UP], self.layers[i % len(self.layers)][GATE_UP])

    def gated_in_bf16(self, i: int) -> None:
        """The same by a weight in 16 bits."""
        weight = self.dense[i % len(self.dense)][GATE_UP]
        select("linear_silu_mul", self.xs[0].device, torch.bfloat16)(self.xs[GATE_UP], weight)

    def decode(self, i: int) -> None:
        """The rows of all four, each weight into memory of its own."""
        pairs = zip(self.layers[i % len(self.layers)], self.dense[i % len(self.dense)], strict=True)
        for weight, dense in pairs:
            decoded.decode_rows(weight, dense.data, first=0)


def chain_rows(device: torch.device, tokens: tuple[int, ...], sweep: bool) -> Iterator[Row]:
    """Times of four products in turn, each of all rows of its weight, of a few layers; and of parts of them."""
    enable_pdl(True)
    draw = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    dense = [[LinearWeight(draw(n, k) * k**-0.5) for n, k in CHAIN] for _ in range(2)]
    decodes = sm90_rows.device_refusal(torch.bfloat16, sm_of(device)) is None
    of_bf16: dict[int, tuple[float, float]] = {}
    for name in CHAINED:
        layers = [[BlockWeight((random_piece(name, n, k, device),), k) for n, k in CHAIN] for _ in range(2)]
        size = sum(sum(plane_sizes(name, n, k)) for n, k in CHAIN)
        if decodes:
            chain = Chain(name, 0, [], [], layers, dense)
            limit = (size + sum(2 * n * k for n, k in CHAIN)) / BANDWIDTH * 1e6
            yield Row(name, 0, 0, 0, "rows decoded alone", timed(chain.decode, 8), limit)
            for steps in PART_STEPS if sweep else ():
                with choosing(sm90_rows, "PART_STEPS", steps):
                    yield Row(name, 0, 0, 0, f"rows decoded alone, PART_STEPS {steps}", timed(chain.decode, 8), limit)
        for m in tokens:
            outs = [torch.empty(m, n, dtype=torch.bfloat16, device=device) for n, _ in CHAIN]
            chain = Chain(name, m, [draw(m, k) for _, k in CHAIN], outs, layers, dense)
            if m not in of_bf16:
                of_bf16[m] = timed(chain.in_bf16, 12), timed(chain.gated_in_bf16, 12)
            limit = (size + sum(2 * m * (n + k) for n, k in CHAIN)) / BANDWIDTH * 1e6
            yield Row(name, 0, 0, m, "a layer", timed(chain.blocks, 12), limit, of_bf16[m][0])
            yield from chain_choices(chain, limit, of_bf16[m]) if sweep else ()
    enable_pdl(False)


def chain_choices(chain: Chain, limit: float, of_bf16: tuple[float, float]) -> Iterator[Row]:
    """The same with other choices, and gate and up with their activation."""
    if chain.m >= decoded.DECODED_FROM:
        (n, k), name = CHAIN[GATE_UP], chain.name
        gate_up = (sum(plane_sizes(name, n, k)) + chain.m * (n + 2 * k)) / BANDWIDTH * 1e6
        yield Row(name, n, k, chain.m, "with SwiGLU", timed(chain.gated, 8), gate_up, of_bf16[1])
    for module, constant, values, matters in CHOICES:
        for value in values if chain.m in matters else ():
            with choosing(module, constant, value):
                yield Row(chain.name, 0, 0, chain.m, f"{constant} {value}", timed(chain.blocks, 8), limit, of_bf16[0])


def _silu_mul(x: Tensor, weight: BlockWeight) -> Tensor:
    y: Tensor = select("block_silu_mul", x.device, x.dtype)(x, weight)
    return y


def _by_op(x: Tensor, weights: list[BlockWeight], out: Tensor, i: int) -> None:
    block_linear(x, weights[i % len(weights)], out=out)


def _by_few(x: Tensor, copies: list[PlaneRows], out: Tensor, split: int, i: int) -> None:
    sm90_few.linear(x, copies[i % len(copies)], None, out, split=split)


def _by_rows(x: Tensor, copies: list[PlaneRows], out: Tensor, i: int) -> None:
    by_rows(x, copies[i % len(copies)], None, out)


def _by_cublas(x: Tensor, made: Tensor, out: Tensor, i: int) -> None:
    torch.mm(x, made.t(), out=out)


def _by_tile(
    x: Tensor, copies: list[PlaneRows], out: Tensor, tile: plane_launch.PlaneTile, splits: int, i: int
) -> None:
    plane_launch.linear(x, copies[i % len(copies)], None, out, tile=tile, splits=splits)


def command_line(doc: str | None, cases: int, tokens: Sequence[int]) -> argparse.ArgumentParser:
    """What benchmarks of planes are asked: products to check, tokens, a seed, a file."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=cases,
                        help="random products to check first (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tokens", default=",".join(map(str, tokens)), help="numbers of tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser


def passed(options: argparse.Namespace, complaints: list[str]) -> bool:
    """Whether no product was wrong; says which were."""
    print(f"checked {options.cases} products, seed {options.seed}: {len(complaints)} wrong")
    for line in complaints[:40]:
        print(" ", line)
    return not complaints


def main() -> int:
    """The command line."""
    parser = command_line(__doc__, 48, TOKENS)
    parser.add_argument("--sweep", action="store_true", help="time a layer with other values of what was chosen")
    parser.add_argument("--tiles", action="store_true", help="time each weight by every tile and split")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(options.seed)
    ops()
    if not passed(options, check(device, options.cases, options.seed)):
        return 1
    found = []
    tokens = tuple(map(int, options.tokens.split(",")))
    alone = () if options.sweep and not options.tiles else rows_of(device, tokens, options.tiles)
    for row in itertools.chain(chain_rows(device, tokens, options.sweep), alone):
        found.append(row)
        shape = f"{row.format} {row.n:6} × {row.k:5}  M = {row.tokens:4}"
        bf16 = "      –" if row.bf16_us is None else f"{row.bf16_us:7.1f}"
        print(f"{shape}  {row.us:8.1f} µs  limit {row.limit_us:7.1f}  BF16 {bf16}  {row.how}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
