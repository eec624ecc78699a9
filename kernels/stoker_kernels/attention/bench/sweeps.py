"""Tables of decode and of prefill: µs for each work and configuration, the best beside the hardware's limit.

Bandwidth counts the bytes of the real keys and values once.
Knows nothing of mixed steps.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from stoker_kernels.attention.bench.case import Case
from stoker_kernels.attention.bench.configs import DECODE_BF16, DECODE_FP8, PREFILL_BF16, PREFILL_FP8, Config, label
from stoker_kernels.attention.bench.measure import checked, graph_time, measure, plan_decode
from stoker_kernels.attention.bench.works import QWEN_7B, Heads, Work
from stoker_kernels.attention.config import DecodeConfig, StreamConfig
from stoker_kernels.attention.meta import attention_workspace
from stoker_kernels.launch.pdl import enable_pdl

HBM_TBPS = 4.33  # what a read of an H200 reaches


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
