"""The command: compile in parallel, check, time, print.

Knows nothing of what a table shows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from stoker_kernels.attention.bench.configs import FEW_BF16, STREAM_BF16
from stoker_kernels.attention.bench.mixed import sweep_mixed
from stoker_kernels.attention.bench.prepare import compile_job, compile_jobs
from stoker_kernels.attention.bench.sweeps import latency_table, sweep_decode, sweep_prefill
from stoker_kernels.attention.bench.works import decode_works, mixed_works, prefill_works


def main() -> None:
    """Compile in parallel, check, time, print."""
    parser = argparse.ArgumentParser("python -m stoker_kernels.attention.bench", description=__doc__)
    parser.add_argument("--page", type=int, default=64, help="KV page size in tokens")
    parser.add_argument("--json", help="write all times here")
    parser.add_argument("--only", choices=("decode", "prefill", "mixed"))
    args = parser.parse_args()
    begin = time.time()
    jobs = compile_jobs(args.page, args.only)
    workers = max(1, min(8, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_job, jobs))
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
