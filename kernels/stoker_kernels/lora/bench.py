"""Checks and times adapters' products on a GPU: `python -m stoker_kernels.lora.bench [--json FILE]`.

Correctness first: each case against the reference. Then all linears of a layer of Qwen2.5-7B as one CUDA graph, over
enough layers that none of them rests in the L2; beside it the time of the bytes that the adapters of its rows have.
Does not know: what the base's own products take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from stoker_kernels.launch import pdl
from stoker_kernels.lora import reference
from stoker_kernels.lora.op import expand_lora, group_tokens, scratch_elements, shrink_lora
from stoker_kernels.lora.types import LoraPlan, LoraTarget

BANDWIDTH = 4.33e12  # bytes a second that a read of an H200 reaches
# Qwen2.5-7B: columns, and rows of each piece, of qkv, output, gate and up, down.
LAYER = ((3584, (3584, 512, 512)), (3584, (3584,)), (3584, (18944, 18944)), (18944, (3584,)))
CASES = tuple((slots, rank, tokens) for slots, rank in ((8, 16), (64, 64)) for tokens in (1, 8, 64, 128, 1024))
LAYERS = 8
REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """All linears of one layer: its time in µs, and that of its bytes."""

    slots: int
    rank: int
    tokens: int
    us: float
    limit_us: float


def random_target(slots: int, rank: int, columns: int, rows: tuple[int, ...]) -> LoraTarget:
    """Matrices that keep what is added near one."""
    a = torch.randn((slots, rank, len(rows), columns), device="cuda", dtype=torch.bfloat16) / columns**0.5
    b = torch.randn((slots, rank, sum(rows)), device="cuda", dtype=torch.bfloat16) / rank**0.5
    return LoraTarget(a, b, torch.full((slots,), rank, dtype=torch.int32, device="cuda"), rows)


def measure(slots: int, rank: int, tokens: int) -> Row:
    """Check one case and time it. Raises AssertionError where a result is wrong."""
    # As many slots as have a token: the others' memory is not read.
    used = min(slots, tokens)
    layers = [[random_target(used, rank, columns, rows) for columns, rows in LAYER] for _ in range(LAYERS)]
    inputs = {columns: torch.randn((tokens, columns), device="cuda", dtype=torch.bfloat16) for columns, _ in LAYER}
    outputs = [torch.zeros((tokens, sum(rows)), device="cuda", dtype=torch.bfloat16) for _, rows in LAYER]
    scratch = torch.empty(max(scratch_elements(tokens, used, rank, len(r), k) for k, r in LAYER), device="cuda")
    adapters = torch.arange(tokens, device="cuda", dtype=torch.int32) % used
    plan = LoraPlan.allocate(tokens, used, adapters.device).of(adapters, used)
    group_tokens(adapters, used, plan)
    for target, y in zip(layers[0], outputs, strict=True):
        check(y, inputs[target.a.shape[3]], target, plan, scratch)

    def body() -> None:
        for layer in layers:
            for target, y in zip(layer, outputs, strict=True):
                shrink_lora(inputs[target.a.shape[3]], target, plan, scratch, planned=True)
                expand_lora(y, target, plan, scratch, planned=True)

    read = sum(target.a.numel() + target.b.numel() for target in layers[0]) * 2
    return Row(slots, rank, tokens, graph_us(body) / LAYERS, read / BANDWIDTH * 1e6)


def check(y: Tensor, x: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor) -> None:
    """Raise AssertionError unless the kernels give what the reference gives."""
    expected = torch.zeros_like(y)
    reference.shrink_lora(x, target, plan, scratch, planned=False)
    reference.expand_lora(expected, target, plan, scratch, planned=False)
    for planned in (False, True):
        shrink_lora(x, target, plan, scratch, planned=planned)
        expand_lora(y.zero_(), target, plan, scratch, planned=planned)
    error = float((y.float() - expected.float()).abs().max() / expected.float().abs().max())
    assert error < 0.02, f"off by {error:.3f} of the largest value"


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
    parser = argparse.ArgumentParser("python -m stoker_kernels.lora.bench", description="Check and time adapters.")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    pdl.enable_pdl(True)
    rows = []
    for case in CASES:
        rows.append(measure(*case))
        row = rows[-1]
        print(
            f"{row.slots:3} adapters of rank {row.rank:3}, {row.tokens:5} tokens: {row.us:8.1f} µs a layer, "
            f"bytes {row.limit_us:6.1f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
