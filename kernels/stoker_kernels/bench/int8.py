"""Checks and times products of 8-bit integers on Hopper: `python -m stoker_kernels.bench.int8 [--tiles] [--json FILE]`.

Correctness first: random shapes by random tiles of every family, launched dependently, bit for bit against the
reference. Then the weights of a layer of 7B and of 8B, each cold: by the op, x quantized before, beside the time that
bytes and operations take, the same weight in e4m3 and in bf16 as `linear` multiplies it, and Triton's kernel; with
`--tiles` by every tile. A gated weight is timed with its activation and what quantizes its result.
Invariants: nothing is timed after a wrong product.
Does not know: what the engine runs around a product.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from stoker_kernels.block_gemm.bench import BANDWIDTH, COLD_BYTES, Row, command_line, passed, timed
from stoker_kernels.gemm import int8_tiles, linear, linear_silu_mul, spread, table, tiles, wide
from stoker_kernels.gemm.bench import multicast_tiles, timed_tiles
from stoker_kernels.gemm.small import MAX_TOKENS, Operands, token_tile
from stoker_kernels.gemm.tiles import AnyTile
from stoker_kernels.int8_gemm import reference, triton_int8
from stoker_kernels.launch.dispatch import ops
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.quant import FP8, Int8Weight, LinearWeight, Quantized

TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096)
# Queries, keys and values, output, gate and up, down; of the third alone with its activation.
LAYERS = {
    "7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
GATE_UP = 2
OPERATIONS = 1544e12  # a second that products in eight bits reach on a cool H200: twice those of bf16
Way = tuple[str, Callable[[int], object]]


def random_weight(n: int, k: int, device: torch.device) -> Int8Weight:
    """Integers of the whole range."""
    data = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
    return Int8Weight(data, torch.rand(n, 1, device=device) * 1e-3 + 1e-5)


def random_rows(m: int, k: int, device: torch.device) -> Quantized:
    """What a kernel that quantizes leaves."""
    data = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=device)
    return Quantized(data, torch.rand(m, 1, device=device) * 0.1 + 1e-3)


def every_tile(weight: Tensor, m: int) -> list[AnyTile]:
    """The tiles worth timing on a weight [N, K] for m tokens, none of gate and up together."""
    found: list[AnyTile] = []
    if m <= MAX_TOKENS:
        found += timed_tiles("cluster-s8", token_tile(m), weight)
        found += multicast_tiles(token_tile(m), weight)
    found += [tile for tile in spread.spread_tiles(len(weight), weight.shape[1], m)
              if tile.rows in spread.INTEGER_ROWS[tile.tokens]]  # fmt: skip
    return [*found, *(tile for tile in wide.wide_tiles(False, True, m) if wide.of_integers(tile))]


def check(device: torch.device, cases: int, draw: random.Random) -> list[str]:
    """Random products by random tiles, and by the op; what is wrong, if anything."""
    complaints = []
    for _ in range(cases):
        n, k = 16 * draw.randrange(1, 1500), 128 * draw.randrange(2, 80)
        m = draw.choice([draw.randint(1, 64), draw.randint(65, 256), draw.randint(257, 3000)])
        weight, x = random_weight(n, k, device), random_rows(m, k, device)
        bias = torch.randn(n, device=device).bfloat16() if draw.random() < 0.5 else None
        want = reference.int8_linear(x, weight, bias=bias, out=None)
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
        o = Operands(x.data, weight.data, out, bias, weight.scale, x.scale)
        several = every_tile(weight.data, m)
        for tile in (int8_tiles.tile_for(n, k, m), *draw.sample(several, min(6, len(several)))):
            if tiles.refusal(tile, o) is not None:
                continue
            for pdl in (False, True, True):
                out.fill_(float("nan"))
                tiles.launch(tile, o, pdl=pdl)
                wrong = int((out != want).sum())
                if wrong:
                    complaints.append(f"{m} × {n} × {k}, {table.text_of(tile)}, {pdl=}: {wrong} differ")
                    break
        small_weight = Int8Weight(weight.data, weight.scale * 1e-3)
        both = reference.int8_linear(x, small_weight, bias=None, out=torch.empty(m, n, device=device))
        gate, up = both.chunk(2, dim=1)
        exact = (torch.nn.functional.silu(gate) * up).double()
        got = linear_silu_mul(x, small_weight)
        # Half a step of the row's, and what is lost where gate, up and the result are rounded to bf16 before.
        apart = (got.data.double() * got.scale.double() - exact).abs()
        wrong = int((~(apart <= 0.52 * got.scale.double() + 0.02 * exact.abs())).sum())
        if wrong:
            complaints.append(f"{m} × {n} × {k} with the activation: {wrong} are lost by more than half a step")
    return complaints


def ways(m: int, n: int, k: int, gated: bool, each_tile: bool, device: torch.device) -> Iterator[Way]:
    """Every way to multiply, by the number of a copy of the weight."""
    copies = [random_weight(n, k, device) for _ in range(max(2, int(COLD_BYTES / (n * k)) + 1))]
    x, count = random_rows(m, k, device), len(copies)
    if gated:
        yield "int8", lambda i: linear_silu_mul(x, copies[i % count])
    else:
        yield "int8", lambda i: linear(x, copies[i % count])
    # The bytes of integers are numbers of e4m3, too; without its two codes of NaN.
    floats = [LinearWeight((each.data & 0x77).view(FP8), each.scale, "fp8_channel") for each in copies]
    as_floats = Quantized((x.data & 0x77).view(FP8), x.scale)
    if gated:
        yield "e4m3", lambda i: linear_silu_mul(as_floats, floats[i % count])
    else:
        yield "e4m3", lambda i: linear(as_floats, floats[i % count])
    copies_of_two = max(2, int(COLD_BYTES / (2 * n * k)) + 1)
    dense = [torch.randn(n, k, device=device).bfloat16() * 0.02 for _ in range(copies_of_two)]
    wide_x = torch.randn(m, k, device=device).bfloat16()
    if gated:
        yield "bf16", lambda i: linear_silu_mul(wide_x, LinearWeight(dense[i % len(dense)]))
    else:
        yield "bf16", lambda i: linear(wide_x, LinearWeight(dense[i % len(dense)]))
    if gated:
        return
    yield "triton", lambda i: triton_int8.int8_linear(x, copies[i % count], bias=None, out=None)
    out = torch.empty((m, n), dtype=torch.bfloat16, device=device)
    for tile in every_tile(copies[0].data, m) if each_tile else ():
        of = [Operands(x.data, each.data, out, None, each.scale, x.scale) for each in copies]
        if tiles.refusal(tile, of[0]) is None:
            yield table.text_of(tile), functools.partial(_by_tile, tile, of)


def _by_tile(tile: AnyTile, of: list[Operands], i: int) -> None:
    tiles.launch(tile, of[i % len(of)], pdl=True)


def rows_of(model: str, tokens: list[int], each_tile: bool, device: torch.device) -> Iterator[Row]:
    """Times of a layer's weights."""
    for (at, (n, k)), m in itertools.product(enumerate(LAYERS[model]), tokens):
        gated = at == GATE_UP
        limit = max((n * k + m * k + 2 * m * n // (1 + gated)) / BANDWIDTH, 2 * m * n * k / OPERATIONS) * 1e6
        for how, run in ways(m, n, k, gated, each_tile, device):
            us = timed(run)
            yield Row(f"{model}{' gated' if gated else ''}", n, k, m, how, us, limit)


def main() -> int:
    """The command line."""
    parser = command_line(__doc__, 40, TOKENS)
    parser.add_argument("--models", default=",".join(LAYERS), help="layers to time (default: %(default)s)")
    parser.add_argument("--tiles", action="store_true", help="time every tile")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(options.seed)
    ops()
    enable_pdl(True)
    if not passed(options, check(device, options.cases, random.Random(options.seed))):
        return 1
    found = []
    for model in options.models.split(","):
        for row in rows_of(model, list(map(int, options.tokens.split(","))), options.tiles, device):
            found.append(row)
            print(f"{row.format:10} {row.n:6} × {row.k:5}  M = {row.tokens:4}  {row.us:8.1f} µs  "
                  f"limit {row.limit_us:7.1f}  {row.how}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
