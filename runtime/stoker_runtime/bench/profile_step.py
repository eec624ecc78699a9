"""`stoker bench profile`: where one decode step's time goes, kernel by kernel, on a GPU.

Runs N sequences of a given context through the serving engine, then records a few graph replays with torch's profiler.
Kernels overlap (programmatic dependent launch), so their times add up to more than the step: `--timeline` shows what
each adds, by the gap to the end of all before it.
Invariants: the steps recorded are the engine's own. Knows nothing of other engines.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from stoker_runtime.bench.engine_flags import engine_config
from stoker_runtime.bench.engine_flags import parser as engine_parser
from stoker_runtime.bench.random_adapters import write_adapters
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import StokerError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Request, SamplingParams

WARM_STEPS = 6
RECORDED_STEPS = 8
# A step starts with the one kernel, and each of its layers has the other.
FIRST_KERNEL, LAYER_KERNEL = "prepare_decode", "decode"


class Launch(NamedTuple):
    """One kernel or copy on the GPU; µs."""

    start: float
    end: float
    name: str


def parser() -> argparse.ArgumentParser:
    """The flags of `stoker bench engine`, plus how many kernels to show, and whether in their order."""
    flags = engine_parser()
    flags.prog = "stoker bench profile"
    flags.add_argument("--top", type=int, default=12, help="kernels to show")
    flags.add_argument("--timeline", action="store_true", help="also a step's launches in order, one layer for all")
    return flags


def record(
    executor: Executor, count: int, context: int, adapters: Sequence[Path] = (), shared: int = 0
) -> list[Launch]:
    """All launches of RECORDED_STEPS steps, in the order of their starts; sequences have the adapters in turn, and
    `shared` tokens before their context that are the same.
    """
    loop = StepLoop(executor, executor.config)
    for folder in adapters:
        loop.adapters.load_now(folder.name, str(folder))
    # Long enough that the first sequence still decodes when the last one has been prefilled.
    prefill_steps = count * context // executor.max_num_batched_tokens + 1
    steps = WARM_STEPS + RECORDED_STEPS + prefill_steps + 8
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    prefix = tuple(j * 15485863 % 50000 + 100 for j in range(shared))
    if shared:
        loop.add(Request("shared", (*prefix, 99), replace(params, max_tokens=1)))
        while loop.has_work:  # from here on the cache has it
            loop.step()
    for i in range(count):
        prompt = prefix + tuple((i * 7919 + j * 104729) % 50000 + 100 for j in range(context))
        loop.add(Request(str(i), prompt, params, adapter=i % len(adapters) + 1 if adapters else 0))
    for _ in range(prefill_steps + WARM_STEPS):
        loop.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(RECORDED_STEPS):
            loop.step()
        torch.cuda.synchronize()
    launches = [
        Launch(event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_time > 0
    ]
    while loop.has_work:
        loop.step()
    return sorted(launches)


def main(argv: list[str]) -> int:
    """Profile each N; 2 for bad arguments or no GPU."""
    args = parser().parse_args(argv)
    try:
        executor = build_executor(engine_config(args))
        if executor.device.type != "cuda":
            raise StokerError("a step is profiled on a GPU; none is visible")
        executor.capture()
        with tempfile.TemporaryDirectory(prefix="stoker-adapters-") as folder:
            adapters = write_adapters(executor.decoder.spec, args.adapters, args.max_lora_rank, Path(folder))
            for count in (int(part) for part in args.n.split(",")):
                launches = record(executor, count, args.input_len, adapters, args.shared_prefix_len)
                show(count, launches, args.top)
                if args.timeline:
                    print("\n".join(timeline(launches)))
    except StokerError as error:
        sys.stderr.write(f"stoker bench: {error.message}\n")
        return 2
    return 0


def show(count: int, launches: Sequence[Launch], top: int) -> None:
    """Print the kernels of one step by their share of it."""
    each: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        each[launch.name].append(launch.end - launch.start)
    step_ms = (max(launch.end for launch in launches) - launches[0].start) / 1e3 / RECORDED_STEPS
    total = sum(map(sum, each.values())) / 1e3 / RECORDED_STEPS
    print(f"N={count}: {step_ms:.3f} ms a step, {total:.3f} ms in kernels")
    for name, times in sorted(each.items(), key=lambda item: -sum(item[1]))[:top]:
        mean, per_step = sum(times) / len(times), len(times) / RECORDED_STEPS
        print(f"  {sum(times) / 1e3 / RECORDED_STEPS:8.3f} ms  {per_step:6.1f} x {mean:8.2f} us  {name[:90]}")


def timeline(launches: Sequence[Launch]) -> list[str]:
    """Lines of the last whole step: up to its first layer's attention, one layer amid the others, from its last on.

    `gap` is the time from the end of all launches before; below 0 where a kernel starts while they still run.
    """
    firsts = [index for index, launch in enumerate(launches) if FIRST_KERNEL in launch.name]
    if len(firsts) < 2:
        return ["  no whole step was recorded"]
    step = launches[firsts[-2] : firsts[-1]]
    layers = [i for i, launch in enumerate(step) if LAYER_KERNEL in launch.name and FIRST_KERNEL not in launch.name]
    shown = set(range(len(step)))
    if len(layers) > 3:
        middle = len(layers) // 2
        spans = ((0, layers[0]), (layers[middle - 1] + 1, layers[middle]), (layers[-1], len(step) - 1))
        shown = {index for first, last in spans for index in range(first, last + 1)}
    before = list(accumulate((launch.end for launch in step), max))
    lines = [f"  {'start us':>10} {'us':>8} {'gap':>7}"]
    for index, (start, end, name) in enumerate(step):
        if index in shown:
            gap = start - before[index - 1] if index else 0.0
            lines.append(f"  {start - step[0].start:10.1f} {end - start:8.1f} {gap:7.1f}  {name[:80]}")
        elif index - 1 in shown:
            lines.append("  ...")
    return lines
