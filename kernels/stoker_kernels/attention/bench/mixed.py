"""The table of mixed steps: one launch beside two, those at once, and each half alone.

Invariants: plans are complete before a way is timed, as in an engine's step.
Knows nothing of how a step is chosen in the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from stoker_kernels.attention import sm90_decode, sm90_mixed, sm90_prefill
from stoker_kernels.attention.bench.case import Case
from stoker_kernels.attention.bench.measure import TOLERANCE, error_after, graph_time, plan_decode
from stoker_kernels.attention.bench.works import Work
from stoker_kernels.attention.config import StreamConfig, mixed_stream_config, prefill_config, stream_config
from stoker_kernels.attention.meta import AttentionMeta, attention_workspace
from stoker_kernels.attention.triton_launch import launch_prefill
from stoker_kernels.launch.pdl import enable_pdl


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
            sm90_decode.launch_streams(inputs, meta, 0, shares, settled=True)

    def prefill(meta: AttentionMeta) -> None:
        launch_prefill(inputs, meta, tiles)

    def wide(meta: AttentionMeta) -> None:
        sm90_prefill.launch_tiles(inputs, meta)

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
        sm90_mixed.launch_mixed(inputs, meta, 0, settled=True)

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
            sm90_mixed.plan_tiles(meta, len(case.q), work.heads.q // work.heads.kv)
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
