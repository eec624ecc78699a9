"""Times `sample` beside `argmax` and the bytes' limit: `python -m stoker_kernels.sampling.bench [--json FILE]`.

Each way of sampling, for each number of rows, by each implementation, on flat logits (what random weights give: tens of
thousands of tokens are kept) and on peaked ones (as models give: few are). Tokens are first compared with the Triton
kernels'.
Invariants: launches run in a CUDA graph over several sets of logits; a way whose tokens differ is not timed.
Does not know: what else a step does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from stoker_kernels.launch import pdl
from stoker_kernels.sampling import sm90_sample, triton_sampling
from stoker_kernels.sampling.op import argmax
from stoker_kernels.sampling.state import SamplingState, SlotSampling, apply_slot_sampling, pack_slot_sampling

BANDWIDTH = 4.33e12
SPREADS = {"flat": 1.2, "peaked": 4.0}
HISTORY = tuple(range(100, 500))
WAYS: dict[str, dict[str, object]] = {
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "k_p_min": {"top_k": 200, "top_p": 0.95, "min_p": 0.01},
    "penalties": {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1, "output": HISTORY},
    "bias": {"top_p": 0.9, "bias": tuple((token, 1.5) for token in range(7, 3000, 100))},
}


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds of one call."""

    rows: int
    logits: str
    way: str
    implementation: str
    us: float


def graph_us(body: Callable[[int], object], sets: int, replays: int = 7) -> float:
    """Median microseconds of a call of `body`, in a graph of one for each set of logits, or eight."""
    calls = max(sets, 8)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                body(i % sets)
    times = []
    for _ in range(replays + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return float(statistics.median(times[1:]))


def state_for(rows: int, vocab: int, way: str) -> SamplingState:
    """Each row samples in this way, by a seed of its own."""
    state = SamplingState.allocate(rows, vocab, torch.device("cuda"))
    updates = [SlotSampling(row, temperature=0.7, seed=row * 7919, **WAYS[way]) for row in range(rows)]  # type: ignore[arg-type]
    apply_slot_sampling(torch.from_numpy(pack_slot_sampling(updates, vocab)).cuda(), rows, state)
    return state


def measure(rows: int, vocab: int, kind: str, ways: list[str], clusters: list[int]) -> list[Sample]:
    """All ways of one number of rows; prints a line a way."""
    sets = max(2, min(8, (256 << 20) // (rows * vocab * 2)))
    logits = [(torch.randn(rows, vocab, device="cuda") * SPREADS[kind]).bfloat16() for _ in range(sets)]
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    limit = rows * vocab * 2 / BANDWIDTH * 1e6
    greedy = graph_us(lambda i: argmax(logits[i]), sets)
    found = [Sample(rows, kind, "greedy", "triton", greedy)]
    print(f"{rows} rows, {kind}: limit {limit:.1f} us, argmax {greedy:.1f}", flush=True)
    for way in ways:
        state, adjust = state_for(rows, vocab, way), way in ("penalties", "bias")
        kept = state.counts.clone()
        expected = triton_sampling.sample(logits[0], state, slots, slots, adjust=adjust)
        cells = []
        for cluster in clusters:
            if cluster:
                sm90_sample.FEW_ROWS, sm90_sample.LEAST_CTAS, sm90_sample.MOST_CTAS = 0, cluster, cluster
            state.counts.copy_(kept)
            got = sm90_sample.sample(logits[0], state, slots, slots, adjust=adjust)
            if not torch.equal(got, expected):
                cells.append(f"cluster {cluster} WRONG in {int((got != expected).sum())} rows")
                continue
            us = graph_us(lambda i: sm90_sample.sample(logits[i], state, slots, slots, adjust=adjust), sets)  # noqa: B023
            found.append(Sample(rows, kind, way, f"cluster {cluster}", us))
            cells.append(f"cluster {cluster} {us:.1f}")
        us = graph_us(lambda i: triton_sampling.sample(logits[i], state, slots, slots, adjust=adjust), sets, 3)  # noqa: B023
        found.append(Sample(rows, kind, way, "triton", us))
        print(f"  {way}: " + ", ".join([*cells, f"triton {us:.1f}"]), flush=True)
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="time sampling")
    parser.add_argument("--json", help="write every sample here")
    parser.add_argument("--rows", default="1,8,40,128,256,512,1024")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--logits", default="flat,peaked")
    parser.add_argument("--clusters", default="0", help="sizes to time, by commas; 0: as the engine")
    parser.add_argument("--vocab", type=int, default=152064)
    options = parser.parse_args()
    pdl.enable_pdl(True)
    samples = [
        sample
        for kind in options.logits.split(",")
        for rows in options.rows.split(",")
        for sample in measure(
            int(rows), options.vocab, kind, options.ways.split(","), [int(c) for c in options.clusters.split(",")]
        )
    ]
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(sample) for sample in samples], file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
