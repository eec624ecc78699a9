"""Compiles the kernels of a sweep before it starts: each once, in processes of their own.

Apart from the command, because a spawned process imports what it runs by name.
Knows nothing of what is timed.
"""

from __future__ import annotations

from stoker_kernels.attention.bench.configs import (
    DECODE_BF16,
    DECODE_FP8,
    FEW_BF16,
    PREFILL_BF16,
    PREFILL_FP8,
    Config,
)
from stoker_kernels.attention.bench.measure import checked
from stoker_kernels.attention.bench.works import QWEN_06B, QWEN_7B, Heads
from stoker_kernels.attention.config import DecodeConfig, PrefillConfig
from stoker_kernels.attention.meta import attention_workspace
from stoker_kernels.launch.pdl import enable_pdl

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


def compile_job(job: Job) -> None:
    """Fill Triton's disk cache with one configuration, in a process of its own."""
    heads, page, fp8, config, pdl = job
    enable_pdl(pdl)
    checked(heads, page, fp8, [config], attention_workspace(1024, heads.q, heads.dim, "cuda"))
