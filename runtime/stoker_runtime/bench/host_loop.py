"""What a step costs on the host, without a device: `python -m stoker_runtime.bench.host_loop`.

Runs the real scheduler over an executor that answers at once, and prints the median and 99th percentile of
`schedule` and `commit` while many sequences decode. Knows nothing of models.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from array import array

from stoker_runtime.engine.messages import encode
from stoker_runtime.engine.outbound import step_message
from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.result import StepResult


def measure(sequences: int, pages: int, page_size: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of each part of each step: prompts of 128 tokens, distinct, admitted together."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=pages,
            page_size=page_size,
            max_num_seqs=sequences,
            max_model_len=pages * page_size // sequences,
            max_num_batched_tokens=8192,
            vocab_size=50_000,
        )
    )
    for index in range(sequences):
        prompt = tuple((index * 31 + position * 7) % 50_000 for position in range(128))
        scheduler.add(Request(str(index), prompt, SamplingParams(max_tokens=steps)), handle=index)
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {"prefill": [], "schedule": [], "commit": [], "message": []}
    launched: Batch | None = None
    while scheduler.has_work:
        began = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        finished, launched = launched, batch
        if finished is None:
            continue
        result = StepResult(array("i", [7]).tolist() * len(finished.sampled_slots))
        ready = time.perf_counter()
        output = scheduler.commit(finished, result)
        committed = time.perf_counter()
        encode(step_message(output, scheduler.stats(), 0))
        encoded = time.perf_counter()
        if batch is not None and batch.prefills:
            times["prefill"].append((scheduled - began) * 1e3)
        elif len(output.tokens) == sequences and not output.finished:
            times["schedule"].append((scheduled - began) * 1e3)
            times["commit"].append((committed - ready) * 1e3)
            times["message"].append((encoded - committed) * 1e3)
    return times


def main() -> None:
    """Print one line a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--pages", type=int, default=65536)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    for part, values in measure(given.sequences, given.pages, given.page_size, given.steps).items():
        ordered = sorted(values)
        print(
            f"{part:<9} median {statistics.median(ordered):.3f} ms, "
            f"p99 {ordered[int(len(ordered) * 0.99)]:.3f} ms, {len(ordered)} steps"
        )


if __name__ == "__main__":
    main()
