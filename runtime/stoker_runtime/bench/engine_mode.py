"""`stoker bench engine`: the engine's speed by the project's definition, beside vLLM's and the chip's limit.

tok/s = generated tokens / wall of a round in which all requests are submitted together, prefill included;
TPOT = (wall - the same round with one output token) / (output length - 1). Before a row is reported its greedy tokens
are checked against the reference; a row that fails the check is printed as wrong and the exit status is 1. Rows of
several ranks are checked when these are gone, against the whole model on one device.
Invariants: the executor and step loop measured are the ones that serve. Knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stoker_runtime.bench import structured_mode
from stoker_runtime.bench.engine_flags import engine_config, parser, peer_key, refuse_shared_prefix, sampling_params
from stoker_runtime.bench.peers import peers_on
from stoker_runtime.bench.random_adapters import write_adapters
from stoker_runtime.bench.rounds import GREEDY, Round, Work, run_round
from stoker_runtime.bench.table import Drafted, ExpertsTouched, Row, SharedPrefix, print_table, save_plot
from stoker_runtime.bench.verify import (
    TOLERANCE_ADAPTERS,
    TOLERANCE_BF16,
    TOLERANCE_FP8,
    TOLERANCE_FP8_HEAD,
    TOLERANCE_FP8_KV,
    UNCHECKED,
    Tolerance,
    Verdict,
    verify_greedy,
)
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import EngineDeadError, StokerError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import EngineStats, SamplingParams

# Above this many requests the warm-up round generates this many tokens only: every kernel and graph has run by then.
SHORT_WARMUP_ABOVE = 64
SHORT_WARMUP_TOKENS = 64
VERIFIED_PROMPTS = 3
# How long ranks that have told their rows may take to leave each other.
ENDS_WITHIN = 10.0
VERIFIED_TOKENS = 1200
LEAST_VERIFIED = 64  # generated tokens, however long the prompt
# What a model that is loaded to be checked by has room for.
LEAST_TOKENS = 128


def default_tolerance(config: EngineConfig) -> Tolerance:
    """What rounding may cost a right engine at this precision; see verify.py."""
    if config.quantization == "fp8":
        return TOLERANCE_FP8
    if config.kv_cache_dtype == "fp8":
        return TOLERANCE_FP8_KV
    if config.quantize_head != "none":
        return TOLERANCE_FP8_HEAD
    return TOLERANCE_ADAPTERS if config.enable_lora else TOLERANCE_BF16


def measure(
    executor: Executor, work: Work, key: str, tolerance: Tolerance, params: SamplingParams = GREEDY,
    adapters: Sequence[Path] = (),
) -> Row:  # fmt: skip
    """Warm up, time, check, and return one row; requests have the adapters in these folders in turn."""
    row, greedy = time_row(executor, work, key, params, adapters)
    decoder = executor.decoder
    return replace(row, verdict=check(decoder, executor.max_model_len, greedy, tolerance, adapters))


def time_row(
    executor: Executor, work: Work, key: str, params: SamplingParams = GREEDY, adapters: Sequence[Path] = ()
) -> tuple[Row, Round]:
    """`measure` of which nothing is checked: a row without a verdict, and the greedy round that is to be checked."""
    n, vocab = len(work.inputs), executor.vocab_size
    loop = StepLoop(executor, executor.config)
    for folder in adapters:
        loop.adapters.load_now(folder.name, str(folder))

    def ran(work: Work, seed: int, params: SamplingParams = params) -> Round:
        return run_round(loop, work, vocab, seed, params, len(adapters))

    if work.shared:
        ran(replace(work, inputs=work.inputs[:1], outputs=(1,)), 0)  # from here on the cache has it
    warm, touched = work.capped(SHORT_WARMUP_TOKENS) if n > SHORT_WARMUP_ABOVE else work, list[ExpertsTouched | None]()
    greedy = run_round(
        loop, warm, vocab, 1, GREEDY, len(adapters), lambda: touched.append(experts_touched(executor))
    )  # fmt: skip
    for _ in range(2 if params.temperature > 0.0 or work.shared else 0):  # a shape's second step captures its graph
        ran(warm, 1)
    before = loop.stats()
    timed = ran(work, 2)
    after = loop.stats()
    drafted = what_drafts_brought(before, after, n) if executor.drafting is not None else None
    took = after.steps - before.steps
    prefix = SharedPrefix(work.shared, took, after.shared_prefix_steps - before.shared_prefix_steps)
    prefill = min(ran(work.capped(1), 3 + i).wall for i in range(2))
    longest = max(work.outputs)
    row = Row(
        key=key,
        n=n,
        tok_s=timed.generated / timed.wall,
        tpot_ms=(timed.wall - prefill) / (longest - 1) * 1e3 if longest > 1 else 0.0,
        wall_s=timed.wall,
        prefill_ms=prefill * 1e3,
        prefill_tok_s=sum(work.inputs) / prefill,
        p50_s=sorted(timed.latencies)[n // 2],
        spread=timed.spread,
        verdict=UNCHECKED,
        peer=peers_on(executor.describe()["device"]).get(key, {}).get(str(n), {}),
        experts=touched[0] if touched else None,
        drafted=drafted,
        prefix=prefix if work.shared else None,
    )
    return row, greedy if params.temperature > 0.0 else timed


def what_drafts_brought(before: EngineStats, after: EngineStats, n: int) -> Drafted:
    """The figures of one round of `n` sequences of one length, from the engine's before and after it."""
    steps, tokens = after.steps - before.steps, after.generation_tokens - before.generation_tokens
    return Drafted(
        offered=after.draft_tokens - before.draft_tokens,
        accepted=after.accepted_tokens - before.accepted_tokens,
        tokens_per_step=tokens / max(steps * n, 1),
    )


def experts_touched(executor: Executor) -> ExpertsTouched | None:
    """What the last step of the executor read of a mixture of experts; None of a dense model."""
    moe, mixture = executor.decoder.spec.moe, executor.decoder.mixture
    if moe is None or mixture is None:
        return None
    counts = mixture.counts[sorted(moe.layers)].cpu()
    distinct = (counts > 0).sum(dim=1)
    return ExpertsTouched(
        tokens=int(counts[0].sum()) // moe.top_k,
        experts=moe.experts,
        least=int(distinct.min()),
        mean=float(distinct.float().mean()),
        most=int(distinct.max()),
    )


def check(
    decoder: Decoder, longest: int, measured: Round, tolerance: Tolerance, adapters: Sequence[Path] = ()
) -> Verdict:
    """Compare the first, middle and last request of a round with the reference, each with its adapter.

    `decoder` is the whole model, `longest` the context that it ran with.
    """
    count = len(measured.prompts)
    chosen = sorted({0, count // 2, count - 1})[:VERIFIED_PROMPTS]
    rooms = {i: max(LEAST_VERIFIED, VERIFIED_TOKENS - len(measured.prompts[i])) for i in chosen}
    sequences = [(list(measured.prompts[i]), list(measured.outputs[i][:room])) for i, room in rooms.items()]
    given = [adapters[i % len(adapters)] for i in chosen] if adapters else []
    return verify_greedy(decoder.spec, decoder.weights, sequences, tolerance, longest, given)


def check_whole(config: EngineConfig, timed: Sequence[tuple[Row, Round]], tolerance: Tolerance) -> list[Row]:
    """The rows with their verdicts, by a model of one rank that is loaded for it: nearly its weights alone, since it
    never runs, so that what fills a device can be checked there.

    Raises:
        ConfigError: the whole model does not fit one device.
    """
    alone = replace(config, tensor_parallel_size=1, pipeline_parallel_size=1, enable_expert_parallel=False)
    least = replace(alone, max_model_len=LEAST_TOKENS, max_num_batched_tokens=LEAST_TOKENS, max_num_seqs=1)
    least = replace(least, num_gpu_blocks=LEAST_TOKENS // 16, gpu_memory_utilization=1.0)
    whole = build_executor(replace(least, disable_custom_all_reduce=False, enforce_eager=True))
    rows = [
        replace(row, verdict=check(whole.decoder, config.max_model_len, greedy, tolerance)) for row, greedy in timed
    ]
    whole.close()
    return rows


def main(argv: list[str]) -> int:
    """Run the benchmark; 0 when every row was right, 1 when one was wrong, 2 for bad arguments."""
    args = parser().parse_args(argv)
    try:
        config = engine_config(args)
        began = time.perf_counter()
        if config.ranks > 1 and not (args.structured or args.json_schema):
            return report_of_ranks(args, config)
        executor = build_executor(config)
        if args.structured or args.json_schema:
            refuse_shared_prefix(args, "--structured and --json-schema, which have prompts of their own")
            return structured_mode.report(args, executor)
        executor.capture()
        took = time.perf_counter() - began
        with tempfile.TemporaryDirectory(prefix="stoker-adapters-") as folder:
            adapters = write_adapters(executor.decoder.spec, args.adapters, args.max_lora_rank, Path(folder))
            return report(args, executor, took, adapters)
    except StokerError as error:
        sys.stderr.write(f"stoker bench: {error.message}\n")
        return 2


def report(args: argparse.Namespace, executor: Executor, start_seconds: float, adapters: Sequence[Path]) -> int:
    """Measure every N, print the table, write the files."""
    key, params = peer_key(args, executor.config), sampling_params(args)
    described, tolerance = introduce(executor, start_seconds), tolerance_of(args, executor.config)
    rows: list[Row] = []
    for work in works(args):
        rows.append(measure(executor, work, key, tolerance, params, adapters))
        print_table(rows[-1:], header=len(rows) == 1)
        if args.json:
            args.json.write_text(json.dumps(as_json(described, rows, start_seconds), indent=1))
    return conclude(args, rows)


def report_of_ranks(args: argparse.Namespace, config: EngineConfig) -> int:
    """As `report`, of several ranks. They live in processes that end before the whole model is loaded, by which their
    rows are checked.
    """
    described, start_seconds, timed = time_apart(args, config)
    print("# checked against the whole model on one device:")
    rows = check_whole(config, timed, tolerance_of(args, config))
    print_table(rows, header=True)
    if args.json:
        args.json.write_text(json.dumps(as_json(described, rows, start_seconds), indent=1))
    return conclude(args, rows)


def time_apart(
    args: argparse.Namespace, config: EngineConfig
) -> tuple[dict[str, str], float, list[tuple[Row, Round]]]:
    """What the ranks say of themselves, the seconds until they were ready, and their rows, nothing of which is checked.

    Raises:
        StokerError: what ended them.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    leader = multiprocessing.get_context("spawn").Process(target=_time_ranks, args=(args, config, theirs))
    leader.start()
    theirs.close()
    try:
        told = ours.recv()
    except EOFError:
        told = EngineDeadError(f"The ranks ended with exit status {leader.exitcode}.")
    leader.join(ENDS_WITHIN)
    leader.kill()  # and with it every rank
    leader.join()
    if isinstance(told, StokerError):
        raise told
    found: tuple[dict[str, str], float, list[tuple[Row, Round]]] = told
    return found


def _time_ranks(args: argparse.Namespace, config: EngineConfig, told: Connection) -> None:
    """The leader's process of `time_apart`."""
    began = time.perf_counter()
    try:
        executor = build_executor(config)
        while executor.idle():  # every graph, which all ranks capture
            pass
        took = time.perf_counter() - began
        described = introduce(executor, took)
        key, params = peer_key(args, executor.config), sampling_params(args)
        timed = []
        for work in works(args):
            timed.append(time_row(executor, work, key, params))
            print_table([timed[-1][0]], header=len(timed) == 1)
        told.send((described, took, timed))
        executor.close()
    except StokerError as error:
        told.send(error)


def introduce(executor: Executor, start_seconds: float | None = None) -> dict[str, str]:
    """Print what the executor says of itself, and how long its start took where that was measured; → the former."""
    described = executor.describe()
    for name, value in described.items():
        print(f"# {name}: {value}")
    if start_seconds is not None:
        print(f"# start with all graphs: {start_seconds:.2f} s")
    return described


def tolerance_of(args: argparse.Namespace, config: EngineConfig) -> Tolerance:
    """What the flags allow a token to lose, else what the precision does."""
    tolerance = default_tolerance(config)
    return Tolerance(args.epsilon, tolerance.mean) if args.epsilon else tolerance


def works(args: argparse.Namespace) -> Iterator[Work]:
    """The work of each N."""
    for n in (int(part) for part in args.n.split(",")):
        if args.uniform:
            least, most = (int(part) for part in args.uniform.split("-"))
            yield replace(Work.uniform(n, least, most), shared=args.shared_prefix_len)
        else:
            yield Work.fixed(n, args.input_len, args.output_len, args.shared_prefix_len)


def conclude(args: argparse.Namespace, rows: Sequence[Row]) -> int:
    """Draw what was asked for; → the exit status."""
    if args.plot:
        save_plot(rows, args.plot)
    return 0 if all(row.verdict.passed for row in rows) else 1


def as_json(described: dict[str, str], rows: Sequence[Row], start_seconds: float) -> dict[str, Any]:
    """Everything measured, with the engine's description and this process's peak memory in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "engine": described,
        "start_seconds": start_seconds,
        "peak_rss_mib": peak,
        "rows": [asdict(row) for row in rows],
    }
