"""What a step costs on the host, without a device: `python -m stoker_runtime.bench.host_loop`.

Runs the real scheduler over an executor that answers at once, and prints the median and 99th percentile of
`schedule` and `commit` while many sequences decode; with `--generate N`, what `LLM.generate` and the bare loop cost
before the first launch and after the last result, which no device's work hides. Knows nothing of models.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from stoker_runtime.bench.rounds import Work, run_round
from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import Drafting
from stoker_runtime.engine.messages import encode
from stoker_runtime.engine.outbound import step_message
from stoker_runtime.kvcache.sight import Sight
from stoker_runtime.offline.llm import LLM
from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.result import MaskRows, StepResult

VOCABULARY, PROMPT, ROUNDS = 151_936, 128, 5

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


@dataclass(frozen=True, slots=True)
class Answered:
    """A batch of an `Idle` executor: random tokens, at once."""

    batch: Batch
    executor: Idle
    masks: MaskRows | None = None

    def sample(self) -> None:
        """Nothing is masked here."""

    def result(self) -> StepResult:
        """The tokens; when they were asked for is noted."""
        drawn = self.executor.drawn[self.batch.step % len(self.executor.drawn)]
        self.executor.ended = time.thread_time()
        return StepResult(drawn[: len(self.batch.sampled_slots)])


class Idle:
    """An executor without a device. `began` and `ended`: the thread's seconds at the first launch and last result."""

    host_pages, host_page_tokens, page_size, verify_tokens = 0, 0.0, 64, 0
    keeps_states = sees = whole_images = False
    snapshots, host_states, host_state_tokens = 0, 0, 0.0
    sight: Sight | None = None
    max_model_len, max_num_batched_tokens = 8192, 8192
    eos_token_ids: tuple[int, ...] = ()
    vocab_size = VOCABULARY
    drafting: Drafting | None = None
    adapters, sleeper, draft_costs = None, None, None

    def __init__(self, sequences: int, tokens: int) -> None:
        """Room for `sequences` of `tokens` tokens."""
        self.max_num_seqs, self.num_pages = sequences, sequences * (tokens // self.page_size + 1)
        generator = random.Random(0)
        self.drawn = [[generator.randrange(VOCABULARY) for _ in range(sequences)] for _ in range(64)]
        self.began: float | None = None
        self.ended = 0.0

    def execute(self, batch: Batch) -> Answered:
        """The batch is done as it is launched."""
        if self.began is None:
            self.began = time.thread_time()
        return Answered(batch, self)

    def idle(self) -> bool:
        """Nothing is left to prepare."""
        return False

    def describe(self) -> dict[str, str]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing is held."""


def bare_ends(sequences: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Microseconds a token before the first launch and after the last result: the bare loop's, and `generate`'s.

    The best of `ROUNDS`; prompts of `PROMPT` tokens, `tokens` generated by each. The thread's own time counts.
    """
    executor = Idle(sequences, PROMPT + tokens)
    llm = LLM.over(executor, EngineConfig(model="shape:qwen3-0.6b", enable_prefix_caching=False))
    generator = random.Random(1)
    prompts = [tuple(generator.randrange(VOCABULARY) for _ in range(PROMPT)) for _ in range(sequences)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    work = Work.fixed(sequences, PROMPT, tokens)
    ways: dict[str, Callable[[], object]] = {
        "bare loop": lambda: run_round(llm.engine, work, VOCABULARY, 0),
        "generate": lambda: llm.generate(prompts, params, use_tqdm=False),
    }
    found = {}
    for name, run in ways.items():
        ends = []
        for _ in range(ROUNDS):
            executor.began = None
            start = time.thread_time()
            run()
            stop = time.thread_time()
            ends.append((executor.began - start, stop - executor.ended))  # type: ignore[operator]
        before, after = min(each[0] for each in ends), min(each[1] for each in ends)
        found[name] = before * 1e6 / (sequences * tokens), after * 1e6 / (sequences * tokens)
    return found


def main() -> None:
    """Print one line a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--pages", type=int, default=65536)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--generate", type=int, metavar="N", help="what LLM.generate costs N sequences of 256 tokens")
    given = parser.parse_args()
    if given.generate:
        for name, (before, after) in bare_ends(given.generate, 256).items():
            print(f"{name:<9} {before:.3f} us a token before the first launch, {after:.3f} after the last result")
        return
    for part, values in measure(given.sequences, given.pages, given.page_size, given.steps).items():
        ordered = sorted(values)
        print(
            f"{part:<9} median {statistics.median(ordered):.3f} ms, "
            f"p99 {ordered[int(len(ordered) * 0.99)]:.3f} ms, {len(ordered)} steps"
        )


if __name__ == "__main__":
    main()
