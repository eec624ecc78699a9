"""Checks and times products with weights in fragments on a GPU: `python -m stoker_kernels.bench.fragments`.

Correctness first: random shapes, groups and zero points of `--numbers`, every compiled tile, against fp64 of the
dequantized weight.
Then the weights of a layer, cold (as many copies as exceed the L2 take turns), medians, beside the time of their bytes;
with `--sweep` every tile and split. Gate and up are timed with their activation too; with `--dense`
also dequantizing and cuBLAS, and cuBLAS alone, which is what `fragment_gemm.takes_tokens` goes by.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from stoker_kernels.block_gemm.bench import BANDWIDTH, COLD_BYTES, command_line, timed
from stoker_kernels.fp4_gemm import dequantize_fp4, store_fp4
from stoker_kernels.fragment_gemm import Numbers, Tile, dense, dequantize, multiply, numbers_of, to_fragments
from stoker_kernels.gemm import linear
from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.quant import FP4_BLOCKS, Fp4Kind, Fp4Weight, IntegerWeight, integer_scale_shape

# Qwen2.5-7B: qkv, output, gate and up, down.
LAYER = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
GATE_AND_UP = 37888
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)


KINDS = ("int4", "int8", "mxfp4", "nvfp4")

FragmentWeight = IntegerWeight | Fp4Weight


@dataclass(frozen=True, slots=True)
class Row:
    """One product: its time in µs, and that of its bytes."""

    numbers: str
    n: int
    k: int
    tokens: int
    kernel: str
    split: int
    us: float
    limit_us: float


def random_weight(kind: str, n: int, k: int, group: int, zeros: bool, device: torch.device) -> FragmentWeight:
    """Random codes in fragments with scales that keep the product near one; `group` and `zeros` are of integers."""
    if kind not in ("int4", "int8"):
        return _random_floats("mxfp4" if kind == "mxfp4" else "nvfp4", n, k, device)
    bits = 4 if kind == "int4" else 8
    shape = integer_scale_shape(n, k, group)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device)
    scale = (torch.rand(shape, device=device) + 0.5) * (3.2 / (1 << bits) / k**0.5)
    zero = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, device=device) if zeros else None
    data = to_fragments(codes, "int4" if bits == 4 else "int8")
    return IntegerWeight(data, scale.bfloat16(), zero, bits, group, layout="fragments")


def _random_floats(kind: Fp4Kind, n: int, k: int, device: torch.device) -> Fp4Weight:
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    shape, factor = (k // FP4_BLOCKS[kind], n), None
    if kind == "mxfp4":
        scale = torch.randint(116, 122, shape, dtype=torch.uint8, device=device)
    else:
        scale = torch.randint(0, 120, shape, dtype=torch.uint8, device=device)
        factor = (torch.rand(n, device=device) + 0.5) / (300 * k**0.5)
    places = (torch.empty_like(data), torch.empty_like(scale), None if factor is None else torch.empty_like(factor))
    weight = Fp4Weight(*places, kind, "fragments")
    store_fp4(weight, 0, data, scale, factor)
    return weight


def exact_values(weight: FragmentWeight) -> Tensor:
    """The weight's values as the reference rounds them."""
    if isinstance(weight, Fp4Weight):
        return dequantize_fp4(weight, torch.bfloat16)
    return dequantize_integers(weight, torch.bfloat16)


def error(got: Tensor, x: Tensor, weight: FragmentWeight, bias: Tensor | None) -> float:
    """‖got − exact‖ / ‖exact‖ of one product; NaN never passes a comparison."""
    exact = x.double() @ exact_values(weight).double().t()
    exact = exact if bias is None else exact + bias.double()
    return float((got.double() - exact).norm() / exact.norm())


def check(kind: str, device: torch.device, cases: int, generator: random.Random) -> list[str]:
    """Random products through every tile that takes them, and through the op; what is wrong, if anything."""
    complaints = []
    for _ in range(cases):
        n, k = 64 * generator.randrange(1, 40), 64 * generator.randrange(1, 60)
        group = generator.choice([16, 32, 64, 128, 256, k])
        weight = random_weight(kind, n, k, group, generator.random() < 0.6, device)
        numbers, of = numbers_of(weight), f"{n} × {k}, group {group}"
        bias = torch.randn(n, device=device).bfloat16() if generator.random() < 0.5 else None
        got = torch.empty(n, k, dtype=torch.bfloat16, device=device)
        dequantize(weight, got)
        if not torch.equal(got, exact_values(weight)):
            complaints.append(f"dequantize {kind} {of}: differs from the reference")
        tokens = generator.choice([1, 3, 8, 13, 16, 29, 32, 57, 64, 100, 128, 200, 300])
        x = torch.randn(tokens, k, device=device).bfloat16()
        if bias is None:
            complaints += _check_pairs(numbers, replace(weight, layout="pairs"), x)
        for tile in (None, *(each for each in numbers.tiles if tokens <= each.tokens or each.groups)):
            out = torch.full((tokens, n), float("nan"), dtype=torch.bfloat16, device=device)
            if tile is None:
                linear(x, weight, bias=bias, out=out)
            else:
                multiply(x, weight, bias, out, tile)
            found = error(out, x, weight, bias)
            if not found < 4e-3:
                name = "the op" if tile is None else numbers.kernel_name(tile)
                complaints.append(f"{name}: {tokens} × {of}: error {found:.2e}")
    return complaints


def _check_pairs(numbers: Numbers, weight: FragmentWeight, x: Tensor) -> list[str]:
    """Gate and up in turn: the product, and its activation, by every tile and some splits; what is wrong."""
    (m, k), n, complaints = x.shape, weight.out_features, []
    both = x.double() @ exact_values(weight).double().t()
    gate, up = both.chunk(2, dim=1)
    gated = torch.nn.functional.silu(gate) * up
    for tile in (each for each in numbers.tiles if m <= each.tokens or each.groups):
        for split in range(1, min(4, k // numbers.columns_at_once(tile)) + 1):
            for exact, fused in ((both, False), (gated, True)):
                out = torch.full(exact.shape, float("nan"), dtype=torch.bfloat16, device=x.device)
                multiply(x, weight, None, out, tile, split, gated=fused)
                found = float((out.double() - exact).norm() / exact.norm())
                if not found < 6e-3:
                    name = f"{numbers.kernel_name(tile)} {'gated' if fused else 'paired'} split {split}"
                    complaints.append(f"{name}: {m} × {n} × {k}: error {found:.2e}")
    return complaints


def rows(
    kind: str, device: torch.device, group: int, sweep: bool, also_dense: bool, tokens: tuple[int, ...]
) -> Iterator[Row]:
    """Times of the layer's weights."""
    for n, k in LAYER:
        first = random_weight(kind, n, k, group, True, device)
        size = sum(part.nbytes for part in (first.data, first.scale, _beside(first)) if part is not None)
        count = max(2, int(COLD_BYTES / size) + 1)
        copies = [first, *(random_weight(kind, n, k, group, True, device) for _ in range(count - 1))]
        for m in tokens:
            limit = (size + 2 * m * (n + k)) / BANDWIDTH * 1e6
            yield from _rows_of(kind, copies, m, sweep, limit)
            if also_dense:
                yield from _dense_rows(kind, copies, m, limit)


def _beside(weight: FragmentWeight) -> Tensor | None:
    return weight.zero if isinstance(weight, IntegerWeight) else weight.factor


def _rows_of(kind: str, copies: list[FragmentWeight], m: int, sweep: bool, limit: float) -> Iterator[Row]:
    n, k, numbers = copies[0].out_features, copies[0].in_features, numbers_of(copies[0])
    xs = [torch.randn(m, k, device=copies[0].data.device).bfloat16() for _ in range(2)]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=xs[0].device)

    def product(i: int) -> None:
        linear(xs[i % 2], copies[i % len(copies)], bias=None, out=out)

    def chosen(tile: Tile, split: int, i: int) -> None:
        multiply(xs[i % 2], copies[i % len(copies)], None, out, tile, split)

    yield Row(kind, n, k, m, "op", 0, timed(product), limit)
    if n == GATE_AND_UP:
        pairs = [replace(weight, layout="pairs") for weight in copies]
        half = torch.empty(m, n // 2, dtype=out.dtype, device=out.device)

        def activated(i: int) -> None:
            multiply(xs[i % 2], pairs[i % len(pairs)], None, half, gated=True)

        yield Row(kind, n, k, m, "gated", 0, timed(activated), limit)
    for tile, split in _choices(numbers, sweep, m):
        us = timed(functools.partial(chosen, tile, split), 8)
        yield Row(kind, n, k, m, numbers.kernel_name(tile), split, us, limit)


def _dense_rows(kind: str, copies: list[FragmentWeight], m: int, limit: float) -> Iterator[Row]:
    """Our kernels however many tokens there are, dequantizing with cuBLAS behind it, and cuBLAS alone."""
    n, k = copies[0].out_features, copies[0].in_features
    x = torch.randn(m, k, device=copies[0].data.device).bfloat16()
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    made = [dense(weight) for weight in copies[: max(2, int(COLD_BYTES / (2 * n * k)) + 1)]]

    def packed(i: int) -> None:
        multiply(x, copies[i % len(copies)], None, out)

    def dequantized(i: int) -> None:
        dequantize(copies[i % len(copies)], made[0])
        torch.mm(x, made[0].t(), out=out)

    def alone(i: int) -> None:
        torch.mm(x, made[i % len(made)].t(), out=out)

    for name, run in (("packed", packed), ("dequantized", dequantized), ("cublas", alone)):
        yield Row(kind, n, k, m, name, 0, timed(run), limit)


def _choices(numbers: Numbers, sweep: bool, m: int) -> Iterator[tuple[Tile, int]]:
    if sweep:
        fitting = [tile for tile in numbers.tiles if m <= tile.tokens <= 2 * m or (tile.tokens >= 64 and m > 64)]
        yield from itertools.product(fitting, (1, 2, 3, 4, 6, 8))


def main() -> int:
    """The command line."""
    parser = command_line(__doc__, 40, TOKENS)
    parser.add_argument("--numbers", default=",".join(KINDS), help="what weights hold (default: %(default)s)")
    parser.add_argument("--group", type=int, default=128, help="columns of a group of integers (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="time every tile and split besides the op's choice")
    parser.add_argument("--dense", action="store_true", help="time dequantizing and cuBLAS besides")
    options = parser.parse_args()
    kinds, tokens = options.numbers.split(","), tuple(map(int, options.tokens.split(",")))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--numbers {', '.join(sorted(unknown))}: known are {', '.join(KINDS)}")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(options.seed)
    generator, found = random.Random(options.seed), []
    for kind in kinds:
        complaints = check(kind, device, options.cases, generator)
        print(f"checked {options.cases} products of {kind}, seed {options.seed}: {len(complaints)} wrong", flush=True)
        for line in complaints[:40]:
            print(" ", line)
        if complaints:
            return 1
    for kind in kinds:
        for row in rows(kind, device, options.group, options.sweep, options.dense, tokens):
            found.append(row)
            if not row.kernel.startswith("sm90_"):
                shape = f"{kind:5}  {row.n:6} × {row.k:5}  M = {row.tokens:4}"
                print(f"{shape}  {row.kernel:11}  {row.us:8.1f} µs  limit {row.limit_us:7.1f}", flush=True)
    for key, same in itertools.groupby(found, key=lambda row: (row.numbers, row.n, row.k, row.tokens)):
        best = min(same, key=lambda row: row.us)
        if options.sweep:
            print(f"best of {key}: {best.kernel} split {best.split} {best.us:.1f} µs")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
