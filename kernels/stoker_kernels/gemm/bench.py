"""Checks and times the small GEMMs on the GPU: `python -m stoker_kernels.gemm.bench [--json FILE] [--seconds 80]`.

Correctness comes first, each family in a process of its own under a time limit, so that a kernel that hangs or faults
costs its own figures only. Then every candidate tile is timed with a cold L2 (weights rotate through more than its
size, launches in one CUDA graph), with and without programmatic dependent launch, beside cuBLAS and the bytes' limit.
Invariants: a family whose check failed is not timed; inputs are random, outputs poisoned before each check.
Does not know: which tile `linear` picks; it prints what the table should hold.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from stoker_kernels.gemm import small
from stoker_kernels.gemm.small import PAIR_BYTES, Family, Operands, Tile
from stoker_kernels.launch.chip import HOPPER_SHARED
from stoker_kernels.quant import FP8

BANDWIDTH = 4.33e12  # bytes/s that a read-only reduction reaches on an H200
COLD_BYTES = 256 << 20  # weights rotate through at least this much: L2 holds 50 MB
CHECK_SECONDS = 60
MODELS = {
    "7b": {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
    "1.5b": {"qkv": (2048, 1536), "o": (1536, 1536), "gate_up": (17920, 1536), "down": (1536, 8960)},
    "0.6b": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
}
FAMILIES = ("cluster-bf16", "cluster-e4m3", "multicast-bf16", "multicast-e4m3")
CLUSTER_KERNELS = ((64, 1), (64, 2), (128, 1), (128, 2))  # rows, chunks
CLUSTER_SIZES = (1, 2, 3, 4, 8)
MULTICAST_ROWS, MULTICAST_TOKENS = (64, 128), (64, 128)
MOST_CTAS = 8  # of a cluster
RINGS = ((PAIR_BYTES, 1), (PAIR_BYTES, 2), (HOPPER_SHARED, 1))  # bytes of shared memory, CTAs an SM
CHECK_TOKENS = (1, 3, 7, 8, 16, 33, 64, 100, 128)
CHECK_SHAPES = ((3584, 3584), (4608, 3584), (1024, 2048), (1000, 1152), (64, 128), (20480, 1024))


def candidates(family: str, tokens: int) -> list[Tile]:
    """One of each kernel and cluster, for checks: `cluster_tiles` and `multicast_tiles` have those worth timing."""
    if family.startswith("multicast"):
        return _multicast_tiles(tokens)
    every = (
        filled("cluster", rows, chunks, tokens, PAIR_BYTES if tokens <= 32 else HOPPER_SHARED, ctas, cluster)
        for (rows, chunks), cluster, ctas in itertools.product(CLUSTER_KERNELS, CLUSTER_SIZES, (1, 2))
    )
    return [tile for tile in every if tile is not None]


def cluster_tiles(tokens: int, weight: torch.Tensor) -> list[Tile]:
    """The cluster tiles worth timing on this weight: about one or two CTAs an SM, or whole tiles dealt to all."""
    found = []
    for (rows, chunks), cluster, (budget, ctas) in itertools.product(CLUSTER_KERNELS, CLUSTER_SIZES, RINGS):
        tiles = -(-weight.shape[0] // rows)
        tile = filled("cluster", rows, chunks, tokens, budget, ctas, cluster)
        worth = 96 <= tiles * cluster <= 280 or (tiles > 132 and cluster <= 2)
        if tile is not None and worth and refused_cut(tile, weight) is None:
            found.append(tile)
    return found


def _multicast_tiles(tokens: int) -> list[Tile]:
    """Every kernel and cluster of the family, with the rings that it has room for."""
    if tokens not in MULTICAST_TOKENS:
        return []
    clusters = [(share, share * split) for share in (1, 2, 4) for split in range(1, MOST_CTAS // share + 1)]
    every = (
        filled("multicast", rows, 1, tokens, budget, 1, cluster, share)
        for rows, (share, cluster), budget in itertools.product(MULTICAST_ROWS, clusters, (PAIR_BYTES, HOPPER_SHARED))
        if cluster > 1
    )
    return [tile for tile in every if tile is not None]


def multicast_tiles(tokens: int, weight: torch.Tensor) -> list[Tile]:
    """The multicast tiles worth timing on this weight: about one CTA an SM, or two where there is room for them."""
    found = []
    for tile in _multicast_tiles(tokens):
        ctas = -(-weight.shape[0] // tile.rows) * tile.split
        most = 132 if tile.shared_bytes > PAIR_BYTES else 264
        if 90 <= ctas <= most and refused_cut(tile, weight) is None:
            found.append(tile)
    return found


def filled(
    family: Family, rows: int, chunks: int, tokens: int, budget: int, ctas: int, cluster: int = 1, share: int = 1
) -> Tile | None:
    """The tile with as many stages as fit into `budget` bytes of shared memory; None for fewer than two."""
    rings = (Tile(family, rows, chunks, tokens, stages, ctas, cluster, share=share) for stages in range(16, 1, -1))
    return next((ring for ring in rings if ring.shared_bytes <= budget), None)


def timed_tiles(family: str, tokens: int, weight: torch.Tensor) -> list[Tile]:
    """The tiles of a family worth timing on this weight."""
    if family.startswith("multicast"):
        return multicast_tiles(tokens, weight)
    return cluster_tiles(tokens, weight) if family.startswith("cluster") else candidates(family, tokens)


def refused_cut(tile: Tile, weight: torch.Tensor) -> str | None:
    """None where the tile can cut this weight, else why not."""
    try:
        small.cut(tile, weight)
    except ValueError as error:
        return str(error)
    return None


def label(tile: Tile) -> str:
    """`n128 c1 m16 s6 x2 k4`: rows, chunks, tokens, stages, CTAs per SM, parts of K; `m2 k4`: 2 tiles share x."""
    share = f" m{tile.share}" if tile.family == "multicast" else ""
    return (f"{tile.family} n{tile.rows} c{tile.chunks} m{tile.tokens} s{tile.stages} x{tile.ctas_per_sm}{share} "
            f"k{tile.split}")


def random_operands(m: int, n: int, k: int, fp8: bool, bias: bool = False) -> Operands:
    """Random operands with a result full of NaN."""
    x, w = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, device="cuda").bfloat16() if bias else None
    if not fp8:
        return Operands(x.bfloat16(), (w * k**-0.5).bfloat16(), out, b)
    w_scale, x_scale = torch.rand(n, 1, device="cuda") * k**-0.5 + 1e-3, torch.rand(m, 1, device="cuda") + 0.5
    return Operands(x.to(FP8), w.to(FP8), out, b, w_scale, x_scale)


def exact(o: Operands) -> torch.Tensor:
    """The product in fp64."""
    y = o.x.double() @ o.weight.double().T
    if o.x_scale is not None and o.w_scale is not None:
        y = y * o.x_scale.double() * o.w_scale.double().T
    return y if o.bias is None else y + o.bias.double()


def complaint(out: torch.Tensor, expected: torch.Tensor, error: torch.Tensor) -> str | None:
    """None where `out` is a bf16 rounding of what is within `error` of `expected`, else where and how it is wrong."""
    allowed = error + (expected.abs() + error) * 2.0**-8
    bad = ~((out.double() - expected).abs() <= allowed)
    if not bad.any():
        return None
    rows, tokens = bad.any(0).nonzero().flatten(), bad.any(1).nonzero().flatten()
    blocks = sorted({int(row) // 64 for row in rows[:: max(1, len(rows) // 512)]})
    ratio = (out.double() / expected)[bad]
    inside = sorted({int(row) % 64 for row in rows})
    return (f"{bad.float().mean():.1%} wrong, {int(out.isnan().sum())} NaN; tokens {tokens.tolist()[:12]} of "
            f"{len(tokens)}; 64-row blocks {blocks[:12]} of {len(blocks)}, rows mod 64 {inside[:12]} of {len(inside)}; "
            f"got/expected {[round(float(v), 3) for v in ratio[:6]]}")


def check_one(tile: Tile, o: Operands, expected: torch.Tensor) -> str | None:
    """Run a tile three times (twice with dependent launch) into NaN; returns what is wrong."""
    first = None
    for pdl in (False, True, True):
        o.out.fill_(float("nan"))
        small.launch(tile, o, pdl=pdl)
        torch.cuda.synchronize()
        slack = 2e-2 if o.x.dtype == FP8 else 2e-3  # wgmma sums e4m3 in < 24 bits
        wrong = complaint(o.out, expected, slack * expected.abs().mean())
        if wrong is not None:
            return f"pdl={pdl}: {wrong}"
        if first is not None and not torch.equal(first, o.out):
            return f"not the same bits twice: {int((first != o.out).sum())} differ"
        first = o.out.clone()
    return None


def check_family(family: str) -> int:
    """Check every candidate tile of a family; prints each failure with its region. Returns the number of failures."""
    fp8 = family.endswith("e4m3")
    torch.manual_seed(time.time_ns() % 2**31)
    failures, done, now = 0, 0, ["start"]
    watchdog = threading.Timer(CHECK_SECONDS - 5, lambda: print(f"{family} is still at {now[0]}", flush=True))
    watchdog.daemon = True
    watchdog.start()
    for m, (n, k) in itertools.product(CHECK_TOKENS, CHECK_SHAPES):
        o = random_operands(m, n, k, fp8, bias=True)
        expected = exact(o)
        for tile in candidates(family, small.token_tile(m)):
            if refused_cut(tile, o.weight) is not None:
                continue
            now[0] = f"{label(tile)} M={m} N={n} K={k}"
            wrong = check_one(tile, o, expected)
            done += 1
            if wrong is not None:
                failures += 1
                if failures <= 12:
                    print(f"WRONG {family} {now[0]}: {wrong}", flush=True)
    now[0] = "batch invariance"
    invariant = batch_invariance(family)
    watchdog.cancel()
    print(f"check {family}: {done - failures} of {done} right; {invariant}", flush=True)
    return failures


def batch_invariance(family: str) -> str:
    """Whether a token's result has the same bits at every M, for one partition."""
    fp8, multicast = family.endswith("e4m3"), family.startswith("multicast")
    tokens = [t for t in small.TOKEN_TILES if candidates(family, t)]
    o = random_operands(tokens[-1], 3584, 3584, fp8)
    results = []
    for t in tokens:
        part = Operands(o.x[:t], o.weight, torch.empty_like(o.out[:t]), None, o.w_scale,
                        None if o.x_scale is None else o.x_scale[:t])
        tile = Tile("multicast", 128, 1, t, 4, 1, 8, share=2) if multicast else Tile("cluster", 128, 1, t, 4, 1, 4)
        small.launch(tile, part, pdl=False)
        results.append(part.out[0])
    same = all(torch.equal(results[0], other) for other in results)
    return f"token 0 has {'the same bits' if same else 'DIFFERENT bits'} at M = {tokens}"


def check_all() -> list[str]:
    """The families that passed, each checked in its own process."""
    running = {
        family: subprocess.Popen([sys.executable, "-m", "stoker_kernels.gemm.bench", "--check", family])
        for family in FAMILIES
    }
    passed, deadline = [], time.monotonic() + CHECK_SECONDS
    for family, process in running.items():
        try:
            if process.wait(max(1.0, deadline - time.monotonic())) == 0:
                passed.append(family)
            else:
                print(f"check {family}: FAILED with exit status {process.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"check {family}: HUNG for {CHECK_SECONDS} s", flush=True)
    return passed


@dataclass
class Sample:
    """One timed configuration: microseconds per product, plain and with dependent launch (0: not applicable)."""

    model: str
    shape: str
    fp8: bool
    m: int
    family: str
    tile: str
    us: float
    us_pdl: float
    limit_us: float


class Weights:
    """Copies of one weight, enough to keep L2 cold, and the operands that go with them."""

    def __init__(self, n: int, k: int, fp8: bool) -> None:
        size = n * k * (1 if fp8 else 2)
        copies = max(2, -(-COLD_BYTES // size))
        base = random_operands(1, n, k, fp8)
        self.n, self.k, self.fp8, self.w_scale = n, k, fp8, base.w_scale
        self.copies = [base.weight.clone() for _ in range(copies)]

    def operands(self, m: int) -> list[Operands]:
        """One product per copy."""
        o = random_operands(m, 8, self.k, self.fp8)
        out = torch.empty(m, self.n, device="cuda", dtype=torch.bfloat16)
        return [Operands(o.x, copy, out, None, self.w_scale, o.x_scale) for copy in self.copies]

    def limit_us(self, m: int) -> float:
        """Bytes of weight, activations and result over the bandwidth."""
        size = 1 if self.fp8 else 2
        return (self.n * self.k * size + m * self.k * size + m * self.n * 2) / BANDWIDTH * 1e6


def timed(run: Callable[[Operands], None], operands: list[Operands], replays: int = 5) -> float:
    """Median microseconds per product of a graph that runs through the copies."""
    launches = max(len(operands), min(40, 4 * len(operands)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(operands[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            run(operands[i % len(operands)])
    times = []
    for _ in range(replays + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return float(statistics.median(times[1:]))


@functools.cache
def unit_scale() -> torch.Tensor:
    """1.0 on the device, made before any capture."""
    return torch.ones((), device="cuda")


def blas(o: Operands) -> None:
    """cuBLAS: bf16, or e4m3 tensorwise with unit scales."""
    if o.x.dtype == FP8:
        one = unit_scale()
        torch._scaled_mm(o.x, o.weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True, out=o.out)
    else:
        torch.mm(o.x, o.weight.t(), out=o.out)


def time_shape(model: str, shape: str, families: list[str], tokens: tuple[int, ...], fp8: bool) -> list[Sample]:
    """Time every candidate of the families on one shape; prints the best few per M beside cuBLAS."""
    weights = Weights(*MODELS[model][shape], fp8)
    samples: list[Sample] = []
    for m in tokens:
        operands, limit = weights.operands(m), weights.limit_us(m)
        rows = [Sample(model, shape, fp8, m, "cublas", "-", timed(blas, operands), 0.0, limit)]
        for family in families:
            for tile in timed_tiles(family, small.token_tile(m), weights.copies[0]):
                plain, chained = (
                    timed(lambda o, t=tile, p=pdl: small.launch(t, o, pdl=p), operands)  # type: ignore[misc]
                    for pdl in (False, True)
                )
                rows.append(Sample(model, shape, fp8, m, family, label(tile), plain, chained, limit))
        samples += rows
        report(rows)
    return samples


def report(rows: list[Sample]) -> None:
    """cuBLAS, then the best five by time with dependent launch, and the best of each family."""
    ours = sorted((row for row in rows if row.family != "cublas"), key=lambda row: row.us_pdl)
    shown = ours[:4] + [next(r for r in ours if r.family == f) for f in dict.fromkeys(r.family for r in ours[4:])]
    first = rows[0]
    cells = [f"{first.model} {'fp8 ' if first.fp8 else ''}{first.shape} M={first.m} limit {first.limit_us:.1f}us"]
    if first.family == "cublas":
        cells.append(f"cublas {first.us:.1f} ({first.limit_us / first.us:.0%})")
    unique = list(dict.fromkeys((r.tile, r.us, r.us_pdl) for r in shown))
    cells += [f"{tile} {us:.1f}/{pdl:.1f} ({first.limit_us / pdl:.0%})" for tile, us, pdl in unique]
    print(" | ".join(cells), flush=True)


def summarize(samples: list[Sample]) -> None:
    """Per model and M: the products of one layer, best tile each, beside cuBLAS and the limit."""
    for (model, fp8, m), group in itertools.groupby(
        sorted(samples, key=lambda s: (s.model, s.fp8, s.m)), key=lambda s: (s.model, s.fp8, s.m)
    ):
        rows = list(group)
        shapes = {row.shape for row in rows}
        best = {shape: min((r.us_pdl for r in rows if r.shape == shape and r.family != "cublas"), default=0.0)
                for shape in shapes}
        theirs = sum(row.us for row in rows if row.family == "cublas")
        limit = sum(row.limit_us for row in rows if row.family == "cublas")
        print(f"layer {model} {'fp8' if fp8 else 'bf16'} M={m} ({len(shapes)} shapes): cublas {theirs:.1f} us, "
              f"ours {sum(best.values()):.1f}, limit {limit:.1f} ({limit / max(sum(best.values()), 1e-9):.0%})")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="check and time the small GEMMs")
    parser.add_argument("--check", choices=FAMILIES, help="only check this family, in this process")
    parser.add_argument("--json", help="write every sample here")
    parser.add_argument("--seconds", type=float, default=80, help="start no further shape after this long")
    parser.add_argument("--models", default="7b,1.5b,0.6b")
    parser.add_argument("--tokens", default="1,16,32,64,128")
    options = parser.parse_args()
    if options.check:
        return min(check_family(options.check), 100)
    began = time.monotonic()
    passed = check_all()
    print(f"{torch.cuda.get_device_name()} after {time.monotonic() - began:.0f} s; columns: plain/PDL us (limit ÷ PDL)")
    tokens = tuple(int(m) for m in options.tokens.split(","))
    samples: list[Sample] = []
    work = [(model, shape, fp8) for model, fp8 in [("7b", False), ("7b", True), ("1.5b", False), ("0.6b", False)]
            if model in options.models.split(",") for shape in MODELS[model]]
    for model, shape, fp8 in work:
        families = [family for family in passed if family.endswith("e4m3") == fp8]
        if time.monotonic() - began > options.seconds:
            print(f"out of time before {model} {shape} {'fp8' if fp8 else 'bf16'}")
            break
        samples += time_shape(model, shape, families, tokens if model == "7b" else tokens[::2], fp8)
    summarize(samples)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(sample) for sample in samples], file)
    return 0 if len(passed) == len(FAMILIES) else 1


if __name__ == "__main__":
    sys.exit(main())
