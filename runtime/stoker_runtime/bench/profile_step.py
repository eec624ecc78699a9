"""`stoker bench profile`: where one decode step's time goes, kernel by kernel, on a GPU.

Runs N sequences of a given context through the serving engine, then records a few graph replays with torch's profiler.
Invariants: the steps recorded are the engine's own. Knows nothing of other engines.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict

import torch

from stoker_runtime.bench.engine_mode import engine_config
from stoker_runtime.bench.engine_mode import parser as engine_parser
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import StokerError
from stoker_runtime.executor.build import build_executor
from stoker_runtime.executor.executor import Executor
from stoker_runtime.request import Request, SamplingParams

WARM_STEPS = 6
RECORDED_STEPS = 8


def parser() -> argparse.ArgumentParser:
    """The flags of `stoker bench engine`, plus how many kernels to show."""
    flags = engine_parser()
    flags.prog = "stoker bench profile"
    flags.add_argument("--top", type=int, default=12, help="kernels to show")
    return flags


def record(executor: Executor, count: int, context: int) -> tuple[float, dict[str, list[float]]]:
    """Milliseconds of one step between replays, and kernel name → microseconds of each launch, over all steps."""
    loop = StepLoop(executor, executor.config)
    # Long enough that the first sequence still decodes when the last one has been prefilled.
    prefill_steps = count * context // executor.max_num_batched_tokens + 1
    steps = WARM_STEPS + RECORDED_STEPS + prefill_steps + 8
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    for i in range(count):
        prompt = tuple((i * 7919 + j * 104729) % 50000 + 100 for j in range(context))
        loop.add(Request(str(i), prompt, params))
    for _ in range(prefill_steps + WARM_STEPS):
        loop.step()
    torch.cuda.synchronize()
    launches: dict[str, list[float]] = defaultdict(list)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(RECORDED_STEPS):
            loop.step()
        torch.cuda.synchronize()
    begin, end = float("inf"), 0.0
    for event in profile.events():
        launches[event.name].append(float(event.device_time))
        begin, end = min(begin, event.time_range.start), max(end, event.time_range.end)
    while loop.has_work:
        loop.step()
    return (end - begin) / 1e3 / RECORDED_STEPS, launches


def main(argv: list[str]) -> int:
    """Profile each N; 2 for bad arguments or no GPU."""
    args = parser().parse_args(argv)
    try:
        executor = build_executor(engine_config(args))
        if executor.device.type != "cuda":
            raise StokerError("a step is profiled on a GPU; none is visible")
        executor.capture()
        for count in (int(part) for part in args.n.split(",")):
            step_ms, launches = record(executor, count, args.input_len)
            show(count, step_ms, launches, args.top)
    except StokerError as error:
        sys.stderr.write(f"stoker bench: {error.message}\n")
        return 2
    return 0


def show(count: int, step_ms: float, launches: dict[str, list[float]], top: int) -> None:
    """Print the kernels of one step by their share of it."""
    total = sum(map(sum, launches.values())) / 1e3 / RECORDED_STEPS
    print(f"N={count}: {step_ms:.3f} ms a step, {total:.3f} ms in kernels")
    for name, times in sorted(launches.items(), key=lambda item: -sum(item[1]))[:top]:
        each, per_step = sum(times) / len(times), len(times) / RECORDED_STEPS
        print(f"  {sum(times) / 1e3 / RECORDED_STEPS:8.3f} ms  {per_step:6.1f} x {each:8.2f} us  {name[:90]}")
