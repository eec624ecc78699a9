"""Checks and times one configuration on one batch.

A configuration is compared with the fp32 reference on ragged random inputs, into a poisoned output, and left out when
it is wrong. Times are medians over replays of a CUDA graph whose calls rotate over disjoint pages, so a call's share
includes its launch.
Knows nothing of tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from stoker_kernels.attention import sm90_decode, sm90_prefill
from stoker_kernels.attention.bench.case import Case
from stoker_kernels.attention.bench.configs import Config, TileKernel, label
from stoker_kernels.attention.bench.works import Heads, Work
from stoker_kernels.attention.config import DecodeConfig, PrefillConfig, StreamConfig
from stoker_kernels.attention.meta import AttentionMeta, AttentionWorkspace
from stoker_kernels.attention.triton_launch import launch_decode, launch_plan, launch_prefill

TOLERANCE = 1e-2  # bf16 rounds the weights and the result to 2⁻⁹


def runner(case: Case, config: Config) -> Callable[[AttentionMeta], None]:
    """A launch of the main kernel; for decode the plan is made here, once, as a step does."""
    inputs = case.inputs()
    if isinstance(config, PrefillConfig):
        return lambda meta: launch_prefill(inputs, meta, config)
    if isinstance(config, TileKernel):
        return lambda meta: sm90_prefill.launch_tiles(inputs, meta)
    plan_decode(case.metas[0], case.work.heads.kv, config)
    if isinstance(config, StreamConfig):
        torch.cuda.synchronize()  # a settled step's plan is complete
        return lambda meta: sm90_decode.launch_streams(inputs, meta, 0, config, settled=True)
    return lambda meta: launch_decode(inputs, meta, config)


def plan_decode(meta: AttentionMeta, kv_heads: int, config: DecodeConfig | StreamConfig) -> None:
    """Plan a step for one of the decode kernels."""
    if isinstance(config, StreamConfig):
        sm90_decode.plan_shares(meta, kv_heads, 0, config)
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
