"""Times the layers of a mixture as a step has them: `python -m stoker_kernels.bench.mixture [--json FILE]`.

The chain norm → qkv → output → norm → router → choice → experts over several layers with weights of their own, in one
CUDA graph with programmatic dependent launch (attention apart), by each of WAYS: "triton" and "own" are implementations
of `experts` behind the router's kernel, "fused" has the own ones choose, too, and "whole" has a warp of gate-up take
all columns of its rows, besides. Own kernels run for as many tokens as they take, whatever the rule of `moe/choose.py`.
What counts is the layer: a kernel that reads ahead while its predecessor drains gains more than its own time shows, and
code that the experts' weights have pushed out of the L2 costs more. One of the rows has no experts, but their choice:
what the rest of a layer takes.
Invariants: all ways take turns on the same weights and tokens.
Does not know: attention, and whether results are right (`moe.bench` checks them).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stoker_kernels.gemm import linear
from stoker_kernels.launch import pdl
from stoker_kernels.launch.dispatch import pin, unpin
from stoker_kernels.moe import ExpertKind, ExpertWeights, Routing, choose, mixture, quantize_experts, route
from stoker_kernels.moe.bench import LAYERS, random_experts
from stoker_kernels.moe.hopper import sm90_few
from stoker_kernels.norm import add_rms_norm
from stoker_kernels.quant import LinearWeight

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Way:
    """Pinned ops, and for which tokens gate-up of the own kernels goes by whole rows."""

    mixture: str
    experts: str
    whole: range = range(0)


WAYS = {
    "triton": Way("split", "triton"),
    "own": Way("split", "own"),
    "fused": Way("fused", "own"),
    "whole": Way("fused", "own", range(1, 9)),
}
HEADS = {"qwen3-30b-a3b": (4096, 512), "gpt-oss-20b": (4096, 512), "mixtral": (4096, 1024)}
"""Width of all queries and of all keys of a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of a layer; norms' are ones."""

    qkv: LinearWeight
    output: LinearWeight
    router: LinearWeight
    experts: ExpertWeights


def random_layer(shape: str, kind: ExpertKind, device: torch.device) -> Layer:
    """A layer whose outputs are of order one."""
    count, _, ffn, hidden = LAYERS[shape]
    queries, keys = HEADS[shape]

    def draw(rows: int, columns: int) -> LinearWeight:
        weight = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
        return LinearWeight(weight.normal_(0.0, columns**-0.5))

    stacked = quantize_experts(random_experts(count, ffn, hidden, device), kind)
    return Layer(draw(queries + 2 * keys, hidden), draw(hidden, queries), draw(count, hidden), stacked)


def step(layers: list[Layer], shape: str, hidden: Tensor, residual: Tensor, *, with_experts: bool = True) -> Tensor:
    """All layers one after the other."""
    queries, routing = HEADS[shape][0], Routing(LAYERS[shape][1], renormalize=True)
    ones = torch.ones_like(residual[0])
    for layer in layers:
        normed = add_rms_norm(hidden, residual, ones, EPS)
        hidden = linear(linear(normed, layer.qkv)[:, :queries].contiguous(), layer.output)
        normed = add_rms_norm(hidden, residual, ones, EPS)
        logits = linear(normed, layer.router)
        if with_experts:
            hidden = mixture(normed, logits, routing, layer.experts)
        else:
            route(logits, routing)
            hidden = normed
    return hidden


def timed(run: Callable[[], object], replays: int = 24) -> float:
    """Median µs of a graph of `run`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        stream.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events) * 1000


def measure(layers: list[Layer], shape: str, tokens: int, ways: list[str]) -> dict[str, float]:
    """µs of a layer for so many tokens, by way; "none": without experts."""
    device = layers[0].router.data.device
    x, residual = (torch.randn(tokens, LAYERS[shape][3], device=device).bfloat16() for _ in range(2))
    found = {"none": timed(lambda: step(layers, shape, x, residual, with_experts=False)) / len(layers)}
    for way in ways:
        with going(WAYS[way]):
            found[way] = timed(lambda: step(layers, shape, x, residual)) / len(layers)
    return found


@contextmanager
def going(way: Way) -> Iterator[None]:
    """Have mixtures run in this way, the own kernels for all tokens that they take."""
    few, whole = choose.FEW_TOKENS, sm90_few.WHOLE_ROWS
    choose.FEW_TOKENS = dict.fromkeys(few, sm90_few.MOST_TOKENS)
    sm90_few.WHOLE_ROWS = way.whole
    pin("mixture", way.mixture)
    pin("experts", way.experts)
    try:
        yield
    finally:
        choose.FEW_TOKENS, sm90_few.WHOLE_ROWS = few, whole
        unpin("mixture")
        unpin("experts")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(LAYERS), help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="in the chain (default: %(default)s)")
    parser.add_argument("--kinds", default="dense,fp8_block", help="of experts (default: %(default)s)")
    parser.add_argument("--tokens", default="1,2,4,8,16", help="numbers of tokens (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="of WAYS (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    unknown = set(options.ways.split(",")) - set(WAYS)
    if unknown:
        parser.error(f"--ways: {', '.join(sorted(unknown))}: there are {', '.join(WAYS)}")
    pdl.enable_pdl(True)
    device, rows = torch.device("cuda", torch.cuda.current_device()), []
    for kind in options.kinds.split(","):
        layers = [random_layer(options.shape, kind, device) for _ in range(options.layers)]
        for tokens in map(int, options.tokens.split(",")):
            found = measure(layers, options.shape, tokens, options.ways.split(","))
            rows.append({"kind": kind, "tokens": tokens, **found})
            times = ", ".join(f"{way} {us:7.1f}" for way, us in found.items())
            print(f"{options.shape} {kind:12} {tokens:5} tokens: µs a layer: {times}", flush=True)
        del layers
    if options.json:
        options.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
