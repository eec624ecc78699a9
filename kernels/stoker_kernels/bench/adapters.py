"""Checks and times products with adapters on a GPU: `python -m stoker_kernels.bench.adapters [--json FILE]`.

Correctness first: each linear of Qwen2.5-7B, with adapters in its own launches (`split`) and within the product
(`fused`, `ahead`), against the reference; tokens without an adapter against `linear`, bit for bit. Then the chain of a
decode layer without attention as one CUDA graph: without adapters and in all ways, beside the time that the bytes of
the adapters would take.
Invariants: all layers' weights exceed L2 many times, so each is read cold. Does not know: what the engine runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stoker_kernels.gemm import linear, linear_silu_mul
from stoker_kernels.gemm.adapted import fused_linear, fused_silu_mul, split_linear, split_silu_mul
from stoker_kernels.gemm.bench import BANDWIDTH
from stoker_kernels.launch import pdl
from stoker_kernels.lora import WORDS, LoraPlan, LoraStep, LoraTarget, group_tokens, reference, scratch_elements
from stoker_kernels.norm import add_rms_norm
from stoker_kernels.quant import LinearWeight

# Qwen2.5-7B: columns, and rows of each piece, of qkv, output, gate and up, down.
LAYER = ((3584, (3584, 512, 512)), (3584, (3584,)), (3584, (18944, 18944)), (18944, (3584,)))
HIDDEN, EPS = 3584, 1e-6
CASES = tuple((slots, rank, tokens) for slots, rank in ((8, 16), (8, 64)) for tokens in (1, 8, 33, 64, 128, 1024))
CASES += ((64, 64, 128),)
LAYERS = 4
REPLAYS = 20
WAYS = ("base", "split", "fused", "ahead")
"""`ahead` is `fused` whose launches wait for words, as in the engine; elsewhere for each other's end."""


@dataclass(frozen=True, slots=True)
class Row:
    """One layer: µs of it in each way asked for, and µs that the bytes of its tokens' adapters alone would take."""

    slots: int
    rank: int
    tokens: int
    us: dict[str, float]
    bytes_us: float


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """The operands of one row: weights and adapters of LAYERS layers, and the step."""

    weights: list[list[LinearWeight]]
    targets: list[list[LoraTarget]]
    step: LoraStep
    x: Tensor
    norm: Tensor

    def run(self, way: str) -> None:
        """All layers' linears, with the norms between them."""
        if way != "base":  # as a step does once: linears know by it that it is another one
            group_tokens(self.step.plan.tokens, len(self.targets[0][0].ranks), self.step.plan)
        y, residual = self.x, self.x.clone()
        for weights, targets in zip(self.weights, self.targets, strict=True):
            y = self._layer(way, y, residual, weights, targets)

    def _layer(
        self, way: str, x: Tensor, residual: Tensor, weights: list[LinearWeight], targets: list[LoraTarget]
    ) -> Tensor:
        def product(index: int, x: Tensor) -> Tensor:
            return product_of(way, x, weights[index], targets[index], self.step)

        qkv = product(0, add_rms_norm(x, residual, self.norm, EPS))
        heads = product(1, qkv[:, :HIDDEN])
        return product(3, product(2, add_rms_norm(heads, residual, self.norm, EPS)))


def product_of(way: str, x: Tensor, weight: LinearWeight, target: LoraTarget, step: LoraStep) -> Tensor:
    """One linear in one way; of two pieces with the activation."""
    gated = len(target.rows) == 2
    if way != "ahead":
        target = replace(target, words=None)
    if way == "base":
        return linear_silu_mul(x, weight) if gated else linear(x, weight)
    if gated:
        return (split_silu_mul if way == "split" else fused_silu_mul)(x, weight, target, step)
    return (split_linear if way == "split" else fused_linear)(x, weight, target, step, bias=None, out=None)


def random_target(slots: int, rank: int, columns: int, rows: tuple[int, ...]) -> LoraTarget:
    """Matrices that keep what is added near one."""
    a = torch.randn((slots, rank, len(rows), columns), device="cuda", dtype=torch.bfloat16) / columns**0.5
    b = torch.randn((slots, rank, sum(rows)), device="cuda", dtype=torch.bfloat16) / rank**0.5
    ranks = torch.full((slots,), rank, dtype=torch.int32, device="cuda")
    words = torch.zeros(WORDS, dtype=torch.int32, device="cuda")
    return LoraTarget(a, b, ranks, rows, words)


def measure(weights: list[list[LinearWeight]], slots: int, rank: int, tokens: int, ways: tuple[str, ...]) -> Row:
    """Check one case and time it. Raises AssertionError where a result is wrong."""
    used = min(slots, tokens)  # the others' memory is not read
    targets = [[random_target(used, rank, columns, rows) for columns, rows in LAYER] for _ in weights]
    room = max(scratch_elements(tokens, used, rank, len(rows), columns) for columns, rows in LAYER)

    turn = torch.zeros(1, dtype=torch.int32, device="cuda")

    def planned(adapters: Tensor) -> LoraStep:
        plan = LoraPlan.allocate(tokens, used, adapters.device, turn).of(adapters, used)
        group_tokens(adapters, used, plan)
        return LoraStep(plan, torch.empty(room, device="cuda"), planned=True)

    every = torch.arange(tokens, device="cuda", dtype=torch.int32)
    step = planned(every % used)
    check(weights[0], targets[0], step, ways)
    check(weights[0], targets[0], planned(every % (used + 1) - 1), ways)
    x = torch.randn((tokens, HIDDEN), device="cuda", dtype=torch.bfloat16)
    case = Case(weights, targets, step, x, torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16))
    read = sum(target.a.numel() + target.b.numel() for target in targets[0]) * 2
    us = {way: graph_us(partial(case.run, way)) / len(weights) for way in ways}
    return Row(slots, rank, tokens, us, read / BANDWIDTH * 1e6)


def check(weights: list[LinearWeight], targets: list[LoraTarget], step: LoraStep, ways: tuple[str, ...]) -> None:
    """Raise AssertionError unless all ways give what the reference gives."""
    tokens = len(step.plan.tokens)
    for weight, target, (columns, rows) in zip(weights, targets, LAYER, strict=True):
        x = torch.randn((tokens, columns), device="cuda", dtype=torch.bfloat16)
        want = x.float() @ weight.data.float().T
        scratch = torch.empty_like(step.scratch)
        reference.shrink_lora(x, target, step.plan, scratch, planned=False)
        reference.expand_lora(want, target, step.plan, scratch, parts=1, planned=False)
        if len(rows) == 2:
            gate, up = want.chunk(2, dim=1)
            want = gate * torch.sigmoid(gate) * up
        for way in ways[1:]:
            got = product_of(way, x, weight, target, step)
            error = float((got.float() - want).abs().max() / want.abs().max())
            assert error < 0.02, f"{way}, {tokens} tokens, {rows} rows: off by {error:.3f} of the largest value"
            none = step.plan.tokens < 0
            plain = product_of("base", x, weight, target, step)
            if len(rows) != 2:
                assert torch.equal(got[none], plain[none]), f"{way}, {tokens} tokens: one without an adapter differs"


def graph_us(body: Callable[[], None]) -> float:
    """Median microseconds of `body` as a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e3)
    return float(statistics.median(times))


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m stoker_kernels.bench.adapters", description="Check and time adapters.")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--ways", default=",".join(WAYS), help="beginning with base (default: %(default)s)")
    parser.add_argument("--most", type=int, default=1024, help="leave out cases of more tokens")
    options = parser.parse_args(arguments)
    ways = tuple(options.ways.split(","))
    if ways[0] != "base" or not set(ways) <= set(WAYS):
        parser.error(f"--ways has to be base, then some of {', '.join(WAYS[1:])}")
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    pdl.enable_pdl(True)
    weights = [
        [
            LinearWeight(torch.randn((sum(rows), columns), device="cuda", dtype=torch.bfloat16) * columns**-0.5)
            for columns, rows in LAYER
        ]
        for _ in range(LAYERS)
    ]
    rows = []
    for slots, rank, tokens in CASES:
        if tokens > options.most:
            continue
        row = measure(weights, slots, rank, tokens, ways)
        rows.append(row)
        over = ", ".join(f"{way} {row.us[way]:7.1f} (+{row.us[way] - row.us['base']:6.1f})" for way in ways[1:])
        print(f"{slots:3} adapters of rank {rank:3}, {tokens:5} tokens: {row.us['base']:7.1f} µs a layer, {over}, "
              f"bytes {row.bytes_us:6.1f}", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
