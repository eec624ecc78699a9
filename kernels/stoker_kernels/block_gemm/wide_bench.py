"""Checks and times products of many tokens with GGUF's planes on Hopper: `python -m stoker_kernels.block_gemm.wide_bench`.

Correctness first: random shapes of every format by random tiles and splits, with and without the activation, against
fp64 of the values that the reference decodes. Then the weights of a layer of 8B, each cold, by the kernel that is
chosen, beside what is taken without it (rows decoded before, from 65 tokens on) and a weight in BF16, which it has to
be faster than; with `--tiles` by every tile and split.
"""  # noqa: E501

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from stoker_kernels.block_gemm import plane_choose, sm90_wide
from stoker_kernels.block_gemm.bench import (
    BANDWIDTH,
    CHAIN,
    COLD_BYTES,
    GATE_UP,
    Row,
    choosing,
    command_line,
    error,
    passed,
    random_piece,
    timed,
)
from stoker_kernels.block_gemm.op import block_linear
from stoker_kernels.block_gemm.reference import decode_planes
from stoker_kernels.block_gemm.sm90_wide import MAX_SPLIT, RANGES, TILES, WideTile
from stoker_kernels.launch.dispatch import ops, select
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.quant import BlockWeight, LinearWeight, PlaneRows, plane_sizes

TOKENS = (96, 128, 192, 256, 512, 1024)
NAMES = ("Q4_K", "Q6_K", "Q8_0")
FLOPS = 800e12  # a second that products in BF16 reach where nothing else bounds them


def check(device: torch.device, cases: int, draw: random.Random) -> list[str]:
    """Random products; what is wrong, if anything."""
    complaints = []
    for case in range(cases):
        name, tile = sm90_wide.FORMATS[case % len(sm90_wide.FORMATS)], draw.choice(TILES)
        n, k, m = 8 * draw.randrange(1, 700), 256 * draw.randrange(1, 24), draw.randrange(1, 600)
        split = draw.choice([RANGES, 1, draw.randint(2, MAX_SPLIT)])
        piece, x = random_piece(name, n, k, device), torch.randn(m, k, device=device).bfloat16()
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
        pairs = draw.random() < 0.5
        with choosing(sm90_wide, "SHARES_X", pairs):
            sm90_wide.linear(x, piece, None, out, tile=tile, split=split)
        found, how = error(out, x, piece), f"{name}, {m} × {n} × {k}, {tile}, split {split}, {pairs=}"
        if not found < 4e-3:
            complaints.append(f"{how}: error {found:.2e}")
        spans = sm90_wide.gated_spans((piece,))
        assert spans is not None, "rows are multiples of eight"
        gated = torch.full((m, n // 2), float("nan"), dtype=torch.bfloat16, device=device)
        with choosing(sm90_wide, "SHARES_X", pairs):
            sm90_wide.silu_mul(x, *spans, gated, tile=tile, split=split)
        gate, up = (x.double() @ decode_planes(piece).bfloat16().double().t()).chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
        found = float((gated.double() - exact).norm() / exact.norm())
        if not found < 5e-3:
            complaints.append(f"{how}, gated: error {found:.2e}")
    return complaints


def ways(
    m: int, pieces: list[PlaneRows], dense: list[Tensor], gated: bool, tiles: bool
) -> Iterator[tuple[str, Callable[[int], None]]]:
    """Every way to multiply: its name, and the product with copy i."""
    n, k = pieces[0].rows, pieces[0].columns
    x = torch.randn(m, k, device=pieces[0].device).bfloat16()
    out = torch.empty(m, n // 2 if gated else n, dtype=torch.bfloat16, device=x.device)
    op = "linear_silu_mul" if gated else "linear"
    multiply = select(op, x.device, x.dtype)

    def in_bf16(i: int) -> None:
        weight = LinearWeight(dense[i % len(dense)])
        multiply(x, weight) if gated else multiply(x, weight, bias=None, out=out)

    def otherwise(i: int) -> None:
        weight = BlockWeight((pieces[i % len(pieces)],), k)
        with choosing(plane_choose, "WIDE_TO", 0):
            if gated:
                select("block_silu_mul", x.device, x.dtype)(x, weight)
            else:
                block_linear(x, weight, out=out)

    def wide(tile: WideTile | None, split: int, i: int, *, pairs: bool = False) -> None:
        piece = pieces[i % len(pieces)]
        if pairs:
            with choosing(sm90_wide, "SHARES_X", True):
                wide(tile, split, i)
            return
        if not gated:
            sm90_wide.linear(x, piece, None, out, tile=tile, split=split)
            return
        spans = sm90_wide.gated_spans((piece,))
        assert spans is not None, "gate and up are halves of a piece"
        sm90_wide.silu_mul(x, *spans, out, tile=tile, split=split)

    yield "BF16", in_bf16
    yield "otherwise", otherwise
    yield "wide", functools.partial(wide, None, 0)
    for tile in TILES if tiles else ():
        for split in (RANGES, *range(1, MAX_SPLIT + 1)):
            named = f"split {split}" if split else "ranges"
            yield f"wide {tile.tokens} × {tile.rows}, {named}", functools.partial(wide, tile, split)
            if tile.pairs and split <= 1:
                shared = functools.partial(wide, tile, split, pairs=True)
                yield f"wide {tile.tokens} × {tile.rows}, {named}, x by pairs", shared


def rows_of(device: torch.device, names: list[str], tokens: list[int], tiles: bool) -> Iterator[Row]:
    """Times of each weight of a layer."""
    enable_pdl(True)
    for index, (n, k) in enumerate(CHAIN):
        copies = 1 + int(COLD_BYTES / (2 * n * k))
        dense = [torch.randn(n, k, device=device).bfloat16() * k**-0.5 for _ in range(copies)]
        for name in names:
            size = sum(plane_sizes(name, n, k))
            pieces = [random_piece(name, n, k, device) for _ in range(max(2, int(COLD_BYTES / size) + 1))]
            for m in tokens:
                limit = max(size / BANDWIDTH, 2 * m * n * k / FLOPS) * 1e6
                for gated in (False, True) if index == GATE_UP else (False,):
                    bf16 = None
                    for how, run in ways(m, pieces, dense, gated, tiles):
                        us = timed(run, 8)
                        bf16 = us if bf16 is None else bf16
                        yield Row(name, n, k, m, ("SwiGLU, " if gated else "") + how, us, limit, bf16)
    enable_pdl(False)


def main() -> int:
    """The command line."""
    parser = command_line(__doc__, 60, TOKENS)
    parser.add_argument("--formats", default=",".join(NAMES), help="formats to time (default: %(default)s)")
    parser.add_argument("--tiles", action="store_true", help="time every tile and split")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(options.seed)
    ops()
    if not passed(options, check(device, options.cases, random.Random(options.seed))):
        return 1
    found = []
    for row in rows_of(device, options.formats.split(","), list(map(int, options.tokens.split(","))), options.tiles):
        found.append(row)
        print(f"{row.format} {row.n:6} × {row.k:5}  M = {row.tokens:4}  {row.us:8.1f} µs  limit {row.limit_us:7.1f}  "
              f"BF16 {row.bf16_us or 0:7.1f}  {row.how}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
