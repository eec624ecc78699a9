"""`python -m stoker_kernels.attention.bench`: right first, then how fast, for each configuration of a small sweep.

Every configuration is compared with the fp32 reference on ragged random inputs, into a poisoned output, and left out of
the tables when it is wrong. Times are medians over replays of a CUDA graph whose calls rotate over disjoint pages (more
than the L2 holds), so a call's share includes its launch. Bandwidth counts the bytes of the real keys and values once.
Knows nothing of the engine: it measures the op alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from stoker_kernels.attention import sm90_decode as attention_sm90
from stoker_kernels.attention import sm90_mixed as attention_sm90_mixed
from stoker_kernels.attention import sm90_prefill as attention_sm90_prefill
from stoker_kernels.attention.choose import Inputs, launch_decode, launch_plan, launch_prefill
from stoker_kernels.attention.config import (
    DecodeConfig,
    PrefillConfig,
    StreamConfig,
    mixed_stream_config,
    prefill_config,
    stream_config,
)
from stoker_kernels.attention.meta import AttentionMeta, AttentionWorkspace, attention_workspace
from stoker_kernels.attention.reference import reference_attention
from stoker_kernels.launch.pdl import enable_pdl

HBM_TBPS = 4.33  # what a read of an H200 reaches
TOLERANCE = 1e-2  # bf16 rounds the weights and the result to 2⁻⁹
L2_BYTES = 160e6  # pages a rotation covers: three times an H200's L2


@dataclass(frozen=True, slots=True)
class TileKernel:
    """csrc/sm90_prefill: it has nothing to choose."""


Config = DecodeConfig | StreamConfig | PrefillConfig | TileKernel


@dataclass(frozen=True, slots=True)
class Heads:
    """One model's attention shape."""

    name: str
    q: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Work:
    """One timed batch: rows of (query tokens, keys), of which the first `decodes` decode."""

    name: str
    heads: Heads
    rows: tuple[tuple[int, int], ...]
    decodes: int = 0


QWEN_7B = Heads("7B", 28, 4, 128)
QWEN_06B = Heads("0.6B", 16, 8, 128)

STREAM_BF16 = StreamConfig(3, 2, 4)
NO_TAIL = 10**6
FEW_BF16 = DecodeConfig(64, 4, 7, 256, 1024, 2)
DECODE_BF16: tuple[Config, ...] = (
    FEW_BF16,
    DecodeConfig(32, 2, 5, 128, 1024, 4),
    DecodeConfig(64, 4, 5, 128, 1024, 3),
    STREAM_BF16,
    StreamConfig(3, 2, 4, NO_TAIL),
    StreamConfig(2, 3, 4),
)
DECODE_FP8: tuple[Config, ...] = (
    DecodeConfig(64, 4, 5, 128, 1024, 5),
    DecodeConfig(64, 4, 5, 128, 1024, 5, cvt=True),
    StreamConfig(6, 2, 4),
    StreamConfig(4, 3, 4),
    StreamConfig(4, 3, 4, NO_TAIL),
)
PREFILL_BF16: tuple[Config, ...] = (PrefillConfig(128, 64, 8, 5), PrefillConfig(64, 64, 4, 5), TileKernel())
PREFILL_FP8: tuple[Config, ...] = (
    PrefillConfig(64, 64, 4, 5),
    PrefillConfig(64, 64, 4, 5, cvt=True),
    PrefillConfig(128, 128, 8, 5, cvt=True),
)


def decode_works() -> list[Work]:
    """PERF.md's decode shapes: prompts of 128 and outputs of 256 begin at 129 keys and end at 384."""
    works = [Work(f"7B 1x{n}", QWEN_7B, ((1, n),), 1) for n in (256, 1024, 8192)]
    for rows, keys in itertools.product((16, 64, 128, 256, 1024), (140, 256, 384)):
        works.append(Work(f"7B {rows}x{keys}", QWEN_7B, ((1, keys),) * rows, rows))
    works.append(Work("7B 32x8192", QWEN_7B, ((1, 8192),) * 32, 32))
    pick = random.Random(0)
    works.append(Work("0.6B 256 ragged", QWEN_06B, tuple((1, pick.randint(100, 2048)) for _ in range(256)), 256))
    return works


def mixed_works() -> list[Work]:
    """Chunks beside rows that decode, and small steps of chunks alone."""
    works = []
    for heads, rows, keys, chunk in (
        (QWEN_7B, 16, 1000, 128),
        (QWEN_7B, 64, 1000, 128),
        (QWEN_7B, 64, 1000, 512),
        (QWEN_7B, 64, 1000, 2048),
        (QWEN_7B, 256, 256, 512),
        (QWEN_7B, 64, 1000, 4096),
        (QWEN_06B, 64, 1000, 512),
        (QWEN_06B, 256, 1000, 2048),
    ):
        name = f"{heads.name} {rows}x{keys} + {chunk}"
        works.append(Work(name, heads, ((1, keys),) * rows + ((chunk, chunk),), rows))
    works.append(Work("7B 16x1000 + 512 at 16K", QWEN_7B, ((1, 1000),) * 16 + ((512, 16384),), 16))
    for rows, tokens in ((1, 128), (1, 512), (4, 128), (1, 2048), (8, 256)):
        works.append(Work(f"7B {rows}x{tokens}", QWEN_7B, ((tokens, tokens),) * rows))
    return works


def prefill_works() -> list[Work]:
    """Long, many, short, and a chunk with a long prefix."""
    return [
        Work("7B 1x8192", QWEN_7B, ((8192, 8192),)),
        Work("7B 64x1024", QWEN_7B, ((1024, 1024),) * 64),
        Work("7B 1x128", QWEN_7B, ((128, 128),)),
        Work("7B 1x2048 after 30K", QWEN_7B, ((2048, 32768),)),
    ]


class Case:
    """A batch on the GPU, with enough disjoint page sets to keep the L2 cold."""

    def __init__(self, work: Work, page: int, fp8: bool, workspace: AttentionWorkspace, rotate: bool = True):
        heads = work.heads
        self.work, self.fp8 = work, fp8
        per_row = [(keys + page - 1) // page for _, keys in work.rows]
        self.kv_bytes = sum(k for _, k in work.rows) * heads.kv * heads.dim * 2 * (1 if fp8 else 2)
        self.rotations = max(2, min(256, int(L2_BYTES / self.kv_bytes) + 1)) if rotate else 1
        pages = sum(per_row) * self.rotations
        shape = (pages, heads.kv, page, heads.dim)
        self.k, self.v = (_random_cache(shape, fp8) for _ in range(2))
        self.scales = [torch.rand(heads.kv, device="cuda") + 0.5 for _ in range(2)] if fp8 else [None, None]
        tokens = [q for q, _ in work.rows]
        self.q = torch.randn(sum(tokens), heads.q, heads.dim, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(pages, device="cuda").int()
        starts = torch.tensor([0, *itertools.accumulate(tokens)], device="cuda").int()
        lengths = torch.tensor([k for _, k in work.rows], device="cuda").int()
        self.metas = []
        for index in range(self.rotations):
            table = torch.zeros(len(tokens), max(per_row), dtype=torch.int32, device="cuda")
            offset = index * sum(per_row)
            filled = torch.arange(max(per_row), device="cuda") < torch.tensor(per_row, device="cuda")[:, None]
            table[filled] = order[offset : offset + sum(per_row)]
            slots = torch.arange(len(tokens), device="cuda").int()
            self.metas.append(
                AttentionMeta(
                    table, slots, starts, lengths, work.decodes, max(tokens), max(k for _, k in work.rows), workspace
                )
            )
        self.out = torch.empty_like(self.q)

    def inputs(self) -> Inputs:
        """The op's arguments."""
        k, v = (t.view(torch.uint16) if self.fp8 else t for t in (self.k, self.v))
        scale = self.work.heads.dim**-0.5
        return Inputs(self.q, k, v, self.out, self.scales[0], self.scales[1], None, scale, 0, 0.0, self.fp8)

    def reference(self) -> Tensor:
        """The right answer, in fp32."""
        return reference_attention(
            self.q.float(),
            self.k,
            self.v,
            self.metas[0],
            scale=self.work.heads.dim**-0.5,
            k_scale=self.scales[0],
            v_scale=self.scales[1],
        )


def _random_cache(shape: tuple[int, ...], fp8: bool) -> Tensor:
    values = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    return values.to(torch.float8_e4m3fn) if fp8 else values


def runner(case: Case, config: Config) -> Callable[[AttentionMeta], None]:
    """A launch of the main kernel; for decode the plan is made here, once, as a step does."""
    inputs = case.inputs()
    if isinstance(config, PrefillConfig):
        return lambda meta: launch_prefill(inputs, meta, config)
    if isinstance(config, TileKernel):
        return lambda meta: attention_sm90_prefill.launch_tiles(inputs, meta)
    plan_decode(case.metas[0], case.work.heads.kv, config)
    if isinstance(config, StreamConfig):
        torch.cuda.synchronize()  # a settled step's plan is complete
        return lambda meta: attention_sm90.launch_streams(inputs, meta, 0, config, settled=True)
    return lambda meta: launch_decode(inputs, meta, config)


def plan_decode(meta: AttentionMeta, kv_heads: int, config: DecodeConfig | StreamConfig) -> None:
    """Plan a step for one of the decode kernels."""
    if isinstance(config, StreamConfig):
        attention_sm90.plan_shares(meta, kv_heads, 0, config)
    else:
        launch_plan(meta, kv_heads, 0, config)


def error_after(case: Case, call: Callable[[], None], want: Tensor) -> float:
    """Largest error over 1 + |want| of what a call writes into a poisoned output; NaN is infinite."""
    case.out.fill_(float("nan"))
    call()
    worst = float(((case.out.float() - want).abs() / (1 + want.abs())).max().item())
    return worst if worst == worst else float("inf")


def worst_error(case: Case, config: Config, want: Tensor) -> float:
    """The error of a configuration; of a tile that does not fit it is infinite."""
    try:
        return error_after(case, lambda: runner(case, config)(case.metas[0]), want)
    except OutOfResources as error:
        print(f"{label(config)}: {error}", flush=True)
        return float("inf")


def graph_time(calls: Iterable[Callable[[], None]], replays: int = 7) -> float:
    """Median seconds of one call, over replays of a graph of all of them."""
    calls = list(calls)
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return float(statistics.median(times[1:]))


def measure(case: Case, config: Config) -> float:
    """Seconds of a call with cold pages."""
    run = runner(case, config)
    return graph_time([partial(run, meta) for meta in case.metas])


CHECKED_ROWS = ((1, 1), (1, 0), (1, 63), (1, 64), (1, 65), (1, 700), (1, 2305), (1, 129))
CHECKED_CHUNKS = ((1, 1), (17, 17), (19, 83), (0, 0), (130, 130), (64, 700), (200, 257))


def checked(heads: Heads, page: int, fp8: bool, configs: Iterable[Config], space: AttentionWorkspace) -> list[Config]:
    """The configurations that are right, the others printed."""
    configs = list(configs)
    decode = not isinstance(configs[0], PrefillConfig | TileKernel)
    rows = CHECKED_ROWS if decode else CHECKED_CHUNKS
    case = Case(Work("check", heads, rows, len(rows) if decode else 0), page, fp8, space, rotate=False)
    want = case.reference()
    good = []
    for config in configs:
        error = worst_error(case, config, want)
        if error < TOLERANCE:
            good.append(config)
        else:
            print(f"WRONG {heads.name} page {page} fp8={fp8} {config}: error {error:.3g}", flush=True)
    return good


Job = tuple[Heads, int, bool, Config, bool]


def compile_jobs(page: int, only: str | None) -> list[Job]:
    """Each kernel of the sweep once: split rules change no code."""
    jobs: list[Job] = []
    if only in (None, "decode"):
        for fp8, configs in ((False, DECODE_BF16), (True, DECODE_FP8)):
            kernels = {(c.block_n, c.num_warps, c.stages, c.cvt): c for c in configs if isinstance(c, DecodeConfig)}
            jobs += [(heads, page, fp8, c, False) for heads in (QWEN_7B, QWEN_06B) for c in kernels.values()]
        jobs.append((QWEN_7B, page, False, FEW_BF16, True))
    if only in (None, "prefill"):
        jobs += [(QWEN_7B, page, False, c, False) for c in PREFILL_BF16 if isinstance(c, PrefillConfig)]
        jobs += [(QWEN_7B, page, True, c, False) for c in PREFILL_FP8]
    return jobs


def _compile(job: Job) -> None:
    """Fill Triton's disk cache with one configuration, in a process of its own."""
    heads, page, fp8, config, pdl = job
    enable_pdl(pdl)
    checked(heads, page, fp8, [config], attention_workspace(1024, heads.q, heads.dim, "cuda"))


def label(config: Config) -> str:
    """`64n4w7s/128m2p` for decode in Triton, `3s2c4u` for decode by shares, `128x64n8w5s` for prefill.

    A trailing c: e4m3 goes by the conversion instruction; a trailing -: shares without a tail.
    """
    if isinstance(config, TileKernel):
        return "sm90"
    if isinstance(config, StreamConfig):
        return f"{config.stages}s{config.ctas_per_sm}c{config.min_units}u{'' if config.tail_from < NO_TAIL else '-'}"
    unpack = "c" if config.cvt else ""
    if isinstance(config, DecodeConfig):
        return (
            f"{config.block_n}n{config.num_warps}w{config.stages}s/{config.min_split}m{config.programs_per_sm}p{unpack}"
        )
    return f"{config.block_m}x{config.block_n}n{config.num_warps}w{config.stages}s{unpack}"


def sweep_decode(page: int, fp8: bool, works: list[Work]) -> list[dict[str, object]]:
    """Table of µs for each work and configuration; the best beside the bandwidth's limit."""
    configs = DECODE_FP8 if fp8 else DECODE_BF16
    print(f"\ndecode {'fp8' if fp8 else 'bf16'} KV, page {page}; µs per call\n  " + "  ".join(map(label, configs)))
    rows = []
    right: dict[Heads, list[Config]] = {}
    for work in works:
        space = attention_workspace(1024, work.heads.q, work.heads.dim, "cuda")
        if work.heads not in right:
            right[work.heads] = checked(work.heads, page, fp8, configs, space)
        case = Case(work, page, fp8, space)
        times = {c: measure(case, c) for c in right[work.heads]}
        best = min(times, key=lambda c: times[c])
        tbps = case.kv_bytes / times[best] / 1e12
        cells = " ".join(f"{times[c] * 1e6:7.1f}" if c in times else "  wrong" for c in configs)
        print(
            f"{work.name:16} {cells} | {times[best] * 1e6:7.1f} µs {tbps:5.2f} TB/s"
            f" {100 * tbps / HBM_TBPS:3.0f}% {label(best)}",
            flush=True,
        )
        rows += [
            {"work": work.name, "fp8": fp8, "page": page, "us": t * 1e6, "config": asdict(c)} for c, t in times.items()
        ]
        del case
    return rows


def sweep_prefill(page: int, fp8: bool, works: list[Work]) -> list[dict[str, object]]:
    """Table of µs for each work and configuration; the best in TFLOP/s of the causal half."""
    configs = PREFILL_FP8 if fp8 else PREFILL_BF16
    print(f"\nprefill {'fp8' if fp8 else 'bf16'} KV, page {page}; µs per call\n  " + "  ".join(map(label, configs)))
    rows = []
    space = attention_workspace(1024, QWEN_7B.q, QWEN_7B.dim, "cuda")
    right = checked(QWEN_7B, page, fp8, configs, space)
    for work in works:
        case = Case(work, page, fp8, space)
        times = {c: measure(case, c) for c in right}
        best = min(times, key=lambda c: times[c])
        pairs = sum(q * (k - q) + q * (q + 1) / 2 for q, k in work.rows)
        flops = 4.0 * work.heads.dim * work.heads.q * pairs
        cells = " ".join(f"{times[c] * 1e6:7.1f}" if c in times else "  wrong" for c in configs)
        print(
            f"{work.name:20} {cells} | {times[best] * 1e6:7.1f} µs {flops / times[best] / 1e12:4.0f} TFLOP/s"
            f" {label(best)}",
            flush=True,
        )
        rows += [
            {"work": work.name, "fp8": fp8, "page": page, "us": t * 1e6, "config": asdict(c)} for c, t in times.items()
        ]
        del case
    return rows


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a mixed step whose shares are planned with `plan`."""

    plan: StreamConfig
    launch: Callable[[AttentionMeta], None]


def mixed_ways(case: Case) -> dict[str, Way]:
    """One launch; two, with each prefill kernel; those two at once; each half alone."""
    inputs, work = case.inputs(), case.work
    kv_bytes = 1 if case.fp8 else 2
    shares, mixed = stream_config(kv_bytes, inputs.group), mixed_stream_config(kv_bytes)
    tokens = sum(q for q, _ in work.rows[work.decodes :])
    tiles = prefill_config(work.heads.dim, kv_bytes, 90, tokens // (len(work.rows) - work.decodes))
    side = torch.cuda.Stream()

    def decode(meta: AttentionMeta) -> None:
        if work.decodes:
            attention_sm90.launch_streams(inputs, meta, 0, shares, settled=True)

    def prefill(meta: AttentionMeta) -> None:
        launch_prefill(inputs, meta, tiles)

    def wide(meta: AttentionMeta) -> None:
        attention_sm90_prefill.launch_tiles(inputs, meta)

    def two(meta: AttentionMeta) -> None:
        decode(meta)
        prefill(meta)

    def two_wide(meta: AttentionMeta) -> None:
        decode(meta)
        wide(meta)

    def at_once(meta: AttentionMeta) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            prefill(meta)
        decode(meta)
        torch.cuda.current_stream().wait_stream(side)

    def one(meta: AttentionMeta) -> None:
        attention_sm90_mixed.launch_mixed(inputs, meta, 0, settled=True)

    ways = {"one": Way(mixed, one), "two": Way(shares, two)}
    if not case.fp8:
        ways["two sm90"] = Way(shares, two_wide)
    if work.decodes:
        ways |= {"at once": Way(shares, at_once), "decode": Way(shares, decode), "prefill": Way(shares, prefill)}
    return ways


def sweep_mixed(page: int, fp8: bool, works: list[Work]) -> list[dict[str, object]]:
    """Table of µs for each work and way, with PDL as in the engine; each whole way's output is checked first."""
    names = ("one", "two", "two sm90", "at once", "decode", "prefill")
    print(f"\nmixed {'fp8' if fp8 else 'bf16'} KV, page {page}; µs per call")
    print(f"{'':24}" + " ".join(f"{name:>9}" for name in names))
    rows = []
    enable_pdl(True)
    for work in works:
        case = Case(work, page, fp8, attention_workspace(1024, work.heads.q, work.heads.dim, "cuda"))
        want = case.reference()
        cells = []
        ways = mixed_ways(case)
        for name in names:
            if name not in ways:
                cells.append(f"{'':9}")
                continue
            way, meta = ways[name], case.metas[0]
            attention_sm90_mixed.plan_tiles(meta, len(case.q), work.heads.q // work.heads.kv)
            if work.decodes:
                plan_decode(meta, work.heads.kv, way.plan)
            torch.cuda.synchronize()  # a settled step's plan is complete
            error = error_after(case, partial(way.launch, meta), want)
            if name not in ("decode", "prefill") and error >= TOLERANCE:
                cells.append(f"{'wrong':>9}")
                continue
            seconds = graph_time([partial(way.launch, meta) for meta in case.metas])
            cells.append(f"{seconds * 1e6:9.1f}")
            rows.append({"work": work.name, "fp8": fp8, "page": page, "us": seconds * 1e6, "way": name})
        print(f"{work.name:24}" + " ".join(cells), flush=True)
        del case
    enable_pdl(False)
    return rows


def latency_table(page: int, config: DecodeConfig | StreamConfig) -> None:
    """Short batches with and without programmatic dependent launch, and what a plan costs."""
    for pdl in (False, True):
        enable_pdl(pdl)
        line = []
        for rows, keys in ((1, 256), (1, 1024), (16, 384), (128, 384)):
            work = Work("", QWEN_7B, ((1, keys),) * rows, rows)
            case = Case(work, page, False, attention_workspace(1024, QWEN_7B.q, QWEN_7B.dim, "cuda"))
            line.append(f"{rows}x{keys} {measure(case, config) * 1e6:.1f}")
            meta = case.metas[0]
        plan = graph_time([partial(plan_decode, meta, QWEN_7B.kv, config)] * 20)
        print(
            f"pdl {'on ' if pdl else 'off'} {label(config)}: "
            + ", ".join(line)
            + f", plan of 128 rows {plan * 1e6:.1f} µs"
        )
    enable_pdl(False)


def main() -> None:
    """Compile in parallel, check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=int, default=64, help="KV page size in tokens")
    parser.add_argument("--json", help="write all times here")
    parser.add_argument("--only", choices=("decode", "prefill", "mixed"))
    args = parser.parse_args()
    begin = time.time()
    jobs = compile_jobs(args.page, args.only)
    workers = max(1, min(8, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))
    print(f"compiled {len(jobs)} in {time.time() - begin:.0f} s on {torch.cuda.get_device_name()}", flush=True)
    rows: list[dict[str, object]] = []
    if args.only in (None, "decode"):
        latency_table(args.page, FEW_BF16)
        latency_table(args.page, STREAM_BF16)
        for fp8 in (False, True):
            rows += sweep_decode(args.page, fp8, decode_works())
    if args.only in (None, "prefill"):
        for fp8 in (False, True):
            rows += sweep_prefill(args.page, fp8, prefill_works())
    if args.only in (None, "mixed"):
        for fp8 in (False, True):
            rows += sweep_mixed(args.page, fp8, mixed_works())
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file)
    print(f"done in {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
