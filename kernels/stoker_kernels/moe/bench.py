"""Checks and times mixtures of experts on a GPU: `python -m stoker_kernels.moe.bench`.

Correctness first: random shapes, choices and distributions against the reference in fp32. Then a layer, by launches,
beside the time of the bytes of the experts that were chosen, or of the operations where those take longer. Each call
takes another set of random tokens, so that the L2 holds none of the next one's experts; a router whose choices are not
balanced measures nothing, so the distinct experts are printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from stoker_kernels.moe import choose, reference, triton_experts, triton_route
from stoker_kernels.moe.hopper import sm90_grouped
from stoker_kernels.moe.types import ExpertKind, ExpertWeights, Routes, Routing, quantize_experts

BANDWIDTH, OPERATIONS = 4.33e12, 772e12  # a second, of an H200: bytes of a read, operations of cuBLAS in bf16
# Experts, choices, width of an expert, hidden size.
LAYERS = {"qwen3-30b-a3b": (128, 8, 768, 2048), "gpt-oss-20b": (32, 4, 2880, 2880), "mixtral": (8, 2, 14336, 4096)}
TOKENS = (1, 4, 16, 64, 256, 1024, 8192)
GROUPS, GROUP = (32, 64, 128, 0), 128  # columns of integers that share a scale: to check, and to time
SETS = 5  # of tokens, by turns
# Between right results: activations that round to another number of 3 bits differ by 6%, which few of them show most.
KINDS: tuple[ExpertKind, ...] = get_args(ExpertKind)
BOUNDS = dict.fromkeys(KINDS, 8e-3) | {"fp8_channel": 6e-2, "fp8_block": 6e-2, "int8_channel": 3e-2}


@dataclass(frozen=True, slots=True)
class Row:
    """One layer: the mean of distinct experts, and µs of its parts, of all of it, and of its bytes or operations.

    The experts are timed as they are chosen, as Triton's kernels alone do them, and as the Hopper kernels for many
    tokens do, NaN where these do not take them.
    """

    layer: str
    kind: str
    tokens: int
    distinct: float
    route_us: float
    two_kernels_us: float
    experts_us: float
    triton_us: float
    grouped_us: float
    us: float
    limit_us: float


def random_experts(count: int, ffn: int, hidden: int, device: torch.device) -> ExpertWeights:
    """Experts in bf16 whose outputs are of order one."""

    def draw(rows: int, columns: int) -> Tensor:
        return torch.empty((count, rows, columns), dtype=torch.bfloat16, device=device).normal_(0.0, columns**-0.5)

    return ExpertWeights(draw(2 * ffn, hidden), draw(hidden, ffn))


def check(device: torch.device, cases: int, seed: int) -> list[str]:
    """Random mixtures against the reference; what is wrong, if anything."""
    generator, complaints = random.Random(seed), []
    for _ in range(cases):
        count, top_k = generator.choice([4, 9, 16, 60]), generator.choice([1, 2, 4])
        tokens = generator.choice([1, 3, 16, 17, 40, 100, 333, 1500])
        kind = generator.choice(KINDS)
        unit = 32 if kind in ("mxfp4", "int4", "int8") else 16
        ffn, hidden = unit * generator.randrange(4, 30), unit * generator.randrange(4, 40)
        weights = quantize_experts(random_experts(count, ffn, hidden, device), kind, generator.choice(GROUPS))
        x = torch.randn(tokens, hidden, device=device).bfloat16()
        logits = torch.randn(tokens, count, device=device) * generator.choice([0.0, 1.0, 10.0])
        found = choose.route(logits, Routing(top_k, renormalize=True, packed=generator.random() < 0.5))
        what = f"{kind}, {tokens} tokens, {top_k} of {count}, {ffn} × {hidden}"
        if not torch.equal(found.ids, reference.route(logits, Routing(top_k)).ids):
            complaints.append(f"{what}: other experts")
        wide = weights
        if kind == "dense":
            wide = ExpertWeights(weights.gate_up.float(), weights.down.float())
        exact = reference.experts(x.float(), found, wide)
        ways = [choose, triton_experts]
        if sm90_grouped.refusal(x, found, weights, None) is None:
            ways.append(sm90_grouped)
        for way in ways:
            error = float((way.experts(x, found, weights).float() - exact).norm() / exact.norm())
            if not error < BOUNDS[kind]:
                complaints.append(f"{what}, {way.__name__}: error {error:.2e}")
    return complaints


def timed(run: Callable[[int], object], rounds: int = 16) -> float:
    """Median µs of `run(i)` inside a graph of ten, over `rounds` replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(SETS):
            run(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(2 * SETS):
                run(i)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        stream.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events) * 1000 / (2 * SETS)


def measure(layer: str, weights: ExpertWeights, tokens: int) -> Row:
    """Time one layer at a number of tokens."""
    count, top_k, ffn, hidden = LAYERS[layer]
    device = weights.down.device
    routing = Routing(LAYERS[layer][1], renormalize=True, packed=weights.in_four_bits)
    xs = [torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(SETS)]
    logits = [torch.randn(tokens, count, device=device).bfloat16() for _ in range(SETS)]
    plans = [choose.route(each, routing) for each in logits]
    distinct = statistics.mean(len(plan.ids.unique()) for plan in plans)

    def whole(i: int) -> Tensor:
        return choose.experts(xs[i % SETS], choose.route(logits[i % SETS], routing), weights)

    def routed(i: int) -> Routes:
        return choose.route(logits[i % SETS], routing)

    def by_two(i: int) -> Routes:
        return triton_route.route(logits[i % SETS], routing)

    def chosen(i: int) -> Tensor:
        return choose.experts(xs[i % SETS], plans[i % SETS], weights)

    def by_triton(i: int) -> Tensor:
        return triton_experts.experts(xs[i % SETS], plans[i % SETS], weights)

    def grouped(i: int) -> Tensor:
        return sm90_grouped.experts(xs[i % SETS], plans[i % SETS], weights)

    taken = sm90_grouped.refusal(xs[0], plans[0], weights, None) is None
    stored = (weights.gate_up, weights.down, weights.gate_up_scale, weights.down_scale)
    moved = distinct * sum(each.nbytes for each in stored if each is not None) / count
    operations = tokens * top_k * 6 * ffn * hidden / (2 if weights.takes_quantized or weights.takes_int8 else 1)
    limit = max(moved / BANDWIDTH, operations / OPERATIONS) * 1e6
    return Row(
        layer, weights.kind, tokens, distinct, timed(routed), timed(by_two), timed(chosen), timed(by_triton),
        timed(grouped) if taken else math.nan, timed(whole), limit,
    )  # fmt: skip


def described(row: Row) -> str:
    """A row as it is printed."""
    experts = f"experts {row.experts_us:8.1f} (Triton {row.triton_us:8.1f}, grouped {row.grouped_us:8.1f})"
    parts = f"route {row.route_us:6.1f} (Triton {row.two_kernels_us:6.1f}), {experts}, all {row.us:8.1f} µs"
    share = f"limit {row.limit_us:8.1f} ({row.limit_us / row.us:.0%})"
    return f"{row.layer:14} {row.kind:12} {row.tokens:5} tokens, {row.distinct:6.1f} experts: {parts}, {share}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(LAYERS), help="which shapes (default: %(default)s)")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="of weights (default: %(default)s)"
    )
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=40, help="random mixtures to check first (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(options.seed)
    complaints = check(device, options.cases, options.seed)
    print(f"checked {options.cases} mixtures, seed {options.seed}: {len(complaints)} wrong")
    for line in complaints[:40]:
        print(" ", line)
    if complaints:
        return 1
    found = []
    for layer in options.layers.split(","):
        count, _, ffn, hidden = LAYERS[layer]
        for kind in options.kinds.split(","):
            weights = quantize_experts(random_experts(count, ffn, hidden, device), kind, GROUP)
            for row in map(functools.partial(measure, layer, weights), map(int, options.tokens.split(","))):
                found.append(row)
                print(described(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
