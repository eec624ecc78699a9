"""Times every tile on many weights: `python -m stoker_kernels.bench.sweep --json FILE [--seconds 240]`.

What the rows and the rule of `table` come from. A product is timed behind an RMSNorm that makes its input, both with
programmatic dependent launch, as products stand in a layer: a tile that fills its ring while its predecessor runs is
worth what it is worth there. Products of gate and up are timed with their activation, in one kernel or two.
Invariants: each tile's result is compared with the product in fp64 before it is timed; weights rotate through more than
L2 holds; operands are random.
Does not know: how a tile is chosen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from stoker_kernels.activation import silu_and_mul, silu_and_mul_quant
from stoker_kernels.bench.fused import fused_tiles
from stoker_kernels.bench.tune import ChosenTile, parse_weight
from stoker_kernels.gemm import choose as gemm_cuda
from stoker_kernels.gemm import table as gemm_table
from stoker_kernels.gemm import tiles as gemm_tiles
from stoker_kernels.gemm.bench import cluster_tiles, complaint, multicast_tiles
from stoker_kernels.gemm.reference import linear_fp64, silu_mul_fp64, sum_error
from stoker_kernels.gemm.small import MAX_TOKENS, Operands, token_tile
from stoker_kernels.gemm.spread import spread_tiles
from stoker_kernels.gemm.tuned import GemmWeight
from stoker_kernels.gemm.wide import tiles_for
from stoker_kernels.launch import pdl
from stoker_kernels.norm import add_rms_norm, add_rms_norm_quant
from stoker_kernels.quant import LinearWeight, Quantized, quantize_fp8, quantize_weight

COLD_BYTES = 160 << 20
TOKENS = (1, 16, 32, 64, 128, 192, 256, 512, 1024)
# (N, K) of published models, by product: qkv, output, gate and up, down.
PUBLISHED = {
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "qwen2.5-14b": ((7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    "qwen3-4b": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    "qwen3-8b": ((24576, 4096), (4096, 12288)),
    "qwen3-14b": ((34816, 5120), (5120, 17408)),
    "qwen2.5-32b": ((55296, 5120), (5120, 27648)),
    "llama-3.2-3b": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
}
MEASURED = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))


def random_shapes(count: int, seed: int) -> list[tuple[int, int]]:
    """Weights of 4 to 260 million elements, sides uniform in their logarithms."""
    generator = random.Random(seed)
    found: list[tuple[int, int]] = []
    while len(found) < count:
        n = 64 * round(math.exp(generator.uniform(math.log(1024), math.log(60000))) / 64)
        k = 128 * round(math.exp(generator.uniform(math.log(1024), math.log(20480))) / 128)
        if 4e6 <= n * k <= 2.6e8:
            found.append((n, k))
    return found


def cases(random_count: int, seed: int) -> Iterator[GemmWeight]:
    """Published weights and random ones in turn, each as bf16 and as e4m3; wide ones as gate and up too."""
    published = [shape for shapes in PUBLISHED.values() for shape in shapes]
    drawn = [*MEASURED, *random_shapes(random_count, seed)]
    for index in range(max(len(published), len(drawn))):
        for shapes in (published, drawn):
            if index < len(shapes):
                n, k = shapes[index]
                for fp8 in (False, True):
                    yield GemmWeight(n, k, fp8, False)
                    if n >= 2 * k:
                        yield GemmWeight(n, k, fp8, True)


class Bench:
    """Copies of a weight of one case, and its products behind a norm."""

    def __init__(self, case: GemmWeight) -> None:
        self.case = case
        size = case.n * case.k * (1 if case.fp8 else 2)
        values = torch.randn(case.n, case.k, device="cuda", dtype=torch.bfloat16) * case.k**-0.5
        base = quantize_weight(values, "fp8_channel" if case.fp8 else "dense")
        more = (
            LinearWeight(base.data.clone(), base.scale, base.kind) for _ in range(max(2, -(-COLD_BYTES // size)) - 1)
        )
        self.weights = [base, *more]
        self.gamma = torch.ones(case.k, device="cuda", dtype=torch.bfloat16)

    def candidates(self, m: int) -> list[ChosenTile]:
        """None (cuBLAS, or two kernels by cuBLAS), and every tile worth timing."""
        data, case = self.weights[0].data, self.case
        if case.gated:
            return [None, *fused_tiles(m, data)]
        wide = tiles_for(False, case.fp8, m)
        small = [*cluster_tiles(token_tile(m), data), *multicast_tiles(token_tile(m), data)] if m <= MAX_TOKENS else []
        return [None, *small, *spread_tiles(case.n, case.k * data.element_size(), m), *wide]

    def product(self, x: torch.Tensor | Quantized, weight: LinearWeight, tile: ChosenTile) -> torch.Tensor | Quantized:
        """As the engine would run it with this tile."""
        if not self.case.gated:
            return gemm_cuda.route(x, weight, None, None, lambda *_: tile)
        if tile is None:
            both = gemm_cuda.route(x, weight, None, None, gemm_table.best_tile)
            return silu_and_mul_quant(both) if isinstance(x, Quantized) else silu_and_mul(both)
        data, scale = (x.data, x.scale) if isinstance(x, Quantized) else (x, None)
        out = torch.empty((len(data), self.case.n // 2), device="cuda", dtype=torch.bfloat16)
        gemm_tiles.launch(tile, Operands(data, weight.data, out, None, weight.scale, scale), pdl=True)
        return quantize_fp8(out) if self.case.fp8 else out

    def wrong(self, m: int, tiles: list[ChosenTile]) -> dict[ChosenTile, str]:
        """What is wrong with each tile's result."""
        x: torch.Tensor | Quantized = torch.randn(m, self.case.k, device="cuda").bfloat16()
        if self.case.fp8:
            assert isinstance(x, torch.Tensor)
            x = quantize_fp8(x)
        weight = self.weights[0]
        found: dict[ChosenTile, str] = {}
        expected, error = linear_fp64(x, weight), sum_error(x, weight)
        if self.case.gated:
            expected, error = silu_mul_fp64(expected, error)
        for tile in tiles:
            if tile is None:
                continue
            data, scale = (x.data, x.scale) if isinstance(x, Quantized) else (x, None)
            out = torch.full(expected.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
            gemm_tiles.launch(tile, Operands(data, weight.data, out, None, weight.scale, scale), pdl=False)
            complained = complaint(out, expected, error)
            if complained is not None:
                found[tile] = complained
        return found

    def timer(self, m: int) -> Callable[[ChosenTile], float]:
        """Median microseconds of norm and product, by tile."""
        update = torch.randn(m, self.case.k, device="cuda", dtype=torch.bfloat16)
        residual = torch.zeros_like(update)
        norm = add_rms_norm_quant if self.case.fp8 else add_rms_norm
        launches = max(len(self.weights), min(16, 4 * len(self.weights)))
        stream = torch.cuda.Stream()

        def run(tile: ChosenTile, count: int) -> None:
            for i in range(count):
                self.product(norm(update, residual, self.gamma, 1e-6), self.weights[i % len(self.weights)], tile)

        def timed(tile: ChosenTile) -> float:
            with torch.cuda.stream(stream):
                run(tile, 1)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()
                run(tile, launches)
                graph.capture_end()
                times = []
                for _ in range(5):
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record(stream)
                    graph.replay()
                    end.record(stream)
                    end.synchronize()
                    times.append(start.elapsed_time(end) * 1e3 / launches)
            return float(statistics.median(times[1:]))

        return timed


def measure(case: GemmWeight, tokens: tuple[int, ...]) -> list[dict[str, object]]:
    """Every tile for every number of tokens, right ones alone."""
    bench, rows = Bench(case), []
    for m in tokens:
        tiles = list(dict.fromkeys(bench.candidates(m)))
        wrong = bench.wrong(m, tiles) if m <= 256 else {}
        for tile, complained in wrong.items():
            print(f"WRONG {case} M={m} {tile}: {complained}", flush=True)
        timed = bench.timer(m)
        best = []
        for tile in tiles:
            if tile not in wrong:
                us, text = timed(tile), "none" if tile is None else gemm_table.text_of(tile)
                best.append((us, text))
                rows.append({**asdict(case), "m": m, "tile": text, "us": us})
        none = next(us for us, text in best if text == "none")
        print(
            f"{case.n}x{case.k} {'e4m3' if case.fp8 else 'bf16'}{' gated' if case.gated else ''} M={m}: "
            f"none {none:.1f}, " + ", ".join(f"{text} {us:.1f}" for us, text in sorted(best)[:3]),
            flush=True,
        )
    return rows


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="time every tile on many weights")
    parser.add_argument("--json", required=True, help="write every sample here")
    parser.add_argument("--seconds", type=float, default=240, help="start no further weight after this long")
    parser.add_argument("--random", type=int, default=24, help="random weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", nargs="*", type=parse_weight, metavar="NxK:DTYPE[:gated]", help="these alone")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--dtype", choices=("bf16", "e4m3"), help="weights of this dtype alone")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    tokens = tuple(int(m) for m in options.tokens.split(","))
    pdl.enable_pdl(True)
    with torch.inference_mode():
        for case in options.weights or cases(options.random, options.seed):
            if options.dtype not in (None, "e4m3" if case.fp8 else "bf16"):
                continue
            if time.monotonic() - began > options.seconds:
                print(f"out of time before {case}")
                break
            rows += measure(case, tokens)
            torch.cuda.empty_cache()
            with open(options.json, "w") as file:
                json.dump(rows, file)
    print(f"{len(rows)} samples in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
