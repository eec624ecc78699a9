"""`stoker bench engine`: the engine's speed by the project's definition, beside vLLM's and the chip's limit.

tok/s = generated tokens / wall of a round in which all requests are submitted together, prefill included;
TPOT = (wall - the same round with one output token) / (output length - 1). Before a row is reported its greedy tokens
are checked against the reference; a row that fails the check is printed as wrong and the exit status is 1.
Invariants: the executor and step loop measured are the ones that serve. Knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stoker_runtime.bench import structured_mode
from stoker_runtime.bench.peers import peers_on
from stoker_runtime.bench.random_adapters import write_adapters
from stoker_runtime.bench.rounds import GREEDY, Round, Work, run_round
from stoker_runtime.bench.table import Drafted, ExpertsTouched, Row, print_table, save_plot
from stoker_runtime.bench.verify import (
    TOLERANCE_ADAPTERS,
    TOLERANCE_BF16,
    TOLERANCE_FP8,
    TOLERANCE_FP8_HEAD,
    TOLERANCE_FP8_KV,
    Tolerance,
    Verdict,
    verify_greedy,
)
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError, StokerError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.fetch.by_name import located
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import EngineStats, SamplingParams

# Above this many requests the warm-up round generates this many tokens only: every kernel and graph has run by then.
SHORT_WARMUP_ABOVE = 64
SHORT_WARMUP_TOKENS = 64
VERIFIED_PROMPTS = 3
# Flags of how tokens are chosen, as fields of SamplingParams: their defaults are greedy.
SAMPLING_DEFAULTS: dict[str, Any] = {
    "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
}  # fmt: skip
VERIFIED_TOKENS = 1200


def parser() -> argparse.ArgumentParser:
    """The flags of `stoker bench engine`."""
    flags = argparse.ArgumentParser(prog="stoker bench engine", description=__doc__.split("\n")[0])
    flags.add_argument("model", nargs="?", default="", help="ORG/NAME of the hub, a folder or .gguf file")
    flags.add_argument("--revision", default="", help="branch, tag or commit of a model of the hub")
    flags.add_argument("--shape", default="", help="random weights: qwen2.5-7b and others, or a folder's config")
    flags.add_argument("--n", default="1,4,16", help="numbers of requests, comma-separated")
    flags.add_argument("--input-len", type=int, default=128)
    flags.add_argument("--output-len", type=int, default=256)
    flags.add_argument("--uniform", default="", metavar="LEAST-MOST", help="draw input and output lengths uniformly")
    for name, default in SAMPLING_DEFAULTS.items():
        text = "sample all requests so; the tokens that are checked come from a greedy round before"
        flags.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text)
    flags.add_argument("--dtype", default="auto")
    flags.add_argument("--quantization", default="auto")
    flags.add_argument("--isq", default="none")
    flags.add_argument("--quantize-head", default="none")
    flags.add_argument("--kv-cache-dtype", default="auto")
    flags.add_argument("--device", default="auto")
    flags.add_argument("--max-num-seqs", type=int, default=0)
    flags.add_argument("--max-num-batched-tokens", type=int, default=0)
    flags.add_argument("--max-model-len", type=int, default=0)
    flags.add_argument("--block-size", type=int, default=0)
    flags.add_argument("--gpu-memory-utilization", type=float, default=0.85, help="leave room for the reference")
    flags.add_argument("--kernel", action="append", default=[], metavar="OP=IMPLEMENTATION")
    flags.add_argument("--speculative-config", default="", metavar="JSON", help="verify drafts, as stoker serve does")
    flags.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    flags.add_argument("--enable-lora", action="store_true", help="with the graphs that adapters run in")
    flags.add_argument("--adapters", type=int, default=0, help="give requests so many random adapters in turn")
    flags.add_argument("--max-lora-rank", type=int, default=16, help="their rank, on every linear")
    flags.add_argument("--batch-invariant", action="store_true", help="bits of a request do not depend on the batch")
    flags.add_argument(
        "--epsilon", type=float, default=0.0, help="loss of a token, in logits, that is a tie (default: by precision)"
    )
    flags.add_argument("--structured", action="store_true", help="a JSON schema against free text of the same lengths")
    flags.add_argument("--json-schema", type=Path, metavar="FILE", help="the same, with this schema")
    flags.add_argument("--json", type=Path, help="write every row here")
    flags.add_argument("--plot", type=Path, help="draw tok/s over N here (needs matplotlib)")
    return flags


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration the flags ask for, with the model fetched if it is the hub's.

    Raises:
        ConfigError: neither or both of MODEL and --shape, or a --kernel that is not OP=IMPLEMENTATION.
    """
    if bool(args.model) == bool(args.shape):
        raise ConfigError("Name a model folder or .gguf file, or --shape NAME: exactly one of them.", param="model")
    pins = []
    for pin in args.kernel:
        op, separator, name = pin.partition("=")
        if not separator:
            raise ConfigError(f"--kernel {pin}: write OP=IMPLEMENTATION.", param="kernel")
        pins.append((op, name))
    config = EngineConfig(
        model=args.model or f"shape:{args.shape}",
        revision=args.revision,
        dtype=args.dtype,
        quantization=args.quantization,
        isq=args.isq,
        quantize_head=args.quantize_head,
        kv_cache_dtype=args.kv_cache_dtype,
        device=args.device,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        page_size=args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        batch_invariant=args.batch_invariant,
        enable_prefix_caching=False,
        speculative_config=args.speculative_config,
        enable_lora=args.enable_lora or args.adapters > 0,
        max_loras=max(1, args.adapters),
        max_lora_rank=args.max_lora_rank,
        max_queued=1 << 20,
        kernels=tuple(pins),
    ).validate()
    return located(config, say=lambda text: print(f"# {text}", flush=True))


def peer_key(args: argparse.Namespace, config: EngineConfig) -> str:
    """The group of peers.json that these flags measure: shape/precision/work."""
    work = f"uniform-{args.uniform}" if args.uniform else f"{args.input_len}x{args.output_len}"
    precision = config.dtype if config.quantization == "none" else config.quantization
    if config.quantize_head != "none":
        precision = f"{precision}-head-{config.quantize_head}"
    if config.kv_cache_dtype == "fp8":
        precision = f"{precision}-kv-fp8" if config.quantization != "none" else "kv-fp8"
    if args.adapters:
        precision = f"{precision}-lora-{args.adapters}x{args.max_lora_rank}"
    sampled = "/sampled" if args.temperature else ""  # of which peers.json has no row
    return f"{args.shape or args.model}/{precision}/{work}{sampled}"


def default_tolerance(config: EngineConfig) -> Tolerance:
    """What rounding may cost a right engine at this precision; see verify.py."""
    if config.quantization == "fp8":
        return TOLERANCE_FP8
    if config.kv_cache_dtype == "fp8":
        return TOLERANCE_FP8_KV
    if config.quantize_head != "none":
        return TOLERANCE_FP8_HEAD
    return TOLERANCE_ADAPTERS if config.enable_lora else TOLERANCE_BF16


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """How the measured rounds choose their tokens.

    Raises:
        ConfigError: a value that no request may have, or a filter of tokens that are not drawn.
    """
    params = SamplingParams(**{name: getattr(args, name) for name in SAMPLING_DEFAULTS})
    if params.temperature == 0.0 and params != SamplingParams(temperature=0.0):
        raise ConfigError("Filters and penalties of sampled tokens need --temperature.", param="temperature")
    if not (0.0 <= params.temperature <= 2.0 and 0.0 < params.top_p <= 1.0 and 0.0 <= params.min_p <= 1.0):
        raise ConfigError("--temperature is 0 to 2, --top-p above 0 and up to 1, --min-p 0 to 1.", param="temperature")
    return params


def measure(
    executor: Executor, work: Work, key: str, tolerance: Tolerance, params: SamplingParams = GREEDY,
    adapters: Sequence[Path] = (),
) -> Row:  # fmt: skip
    """Warm up, time, check, and return one row; requests have the adapters in these folders in turn."""
    n, vocab = len(work.inputs), executor.vocab_size
    loop = StepLoop(executor, executor.config)
    for folder in adapters:
        loop.adapters.load_now(folder.name, str(folder))

    def ran(work: Work, seed: int, params: SamplingParams = params) -> Round:
        return run_round(loop, work, vocab, seed, params, len(adapters))

    warm = work.capped(SHORT_WARMUP_TOKENS) if n > SHORT_WARMUP_ABOVE else work
    greedy = ran(warm, 1, GREEDY)
    for _ in range(2 if params.temperature > 0.0 else 0):  # a shape's second step captures its graph
        ran(warm, 1)
    before = loop.stats()
    timed = ran(work, 2)
    drafted = what_drafts_brought(before, loop.stats(), n) if executor.drafting is not None else None
    touched = experts_touched(executor)
    prefill = min(ran(work.capped(1), 3 + i).wall for i in range(2))
    longest = max(work.outputs)
    return Row(
        key=key,
        n=n,
        tok_s=timed.generated / timed.wall,
        tpot_ms=(timed.wall - prefill) / (longest - 1) * 1e3 if longest > 1 else 0.0,
        wall_s=timed.wall,
        prefill_ms=prefill * 1e3,
        prefill_tok_s=sum(work.inputs) / prefill,
        p50_s=sorted(timed.latencies)[n // 2],
        spread=timed.spread,
        verdict=check(executor, greedy if params.temperature > 0.0 else timed, tolerance, adapters),
        peer=peers_on(executor.describe()["device"]).get(key, {}).get(str(n), {}),
        experts=touched,
        drafted=drafted,
    )


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


def check(executor: Executor, measured: Round, tolerance: Tolerance, adapters: Sequence[Path] = ()) -> Verdict:
    """Compare the first, middle and last request of a round with the reference, each with its adapter."""
    count = len(measured.prompts)
    chosen = sorted({0, count // 2, count - 1})[:VERIFIED_PROMPTS]
    sequences = [
        (list(measured.prompts[i]), list(measured.outputs[i][: max(1, VERIFIED_TOKENS - len(measured.prompts[i]))]))
        for i in chosen
    ]
    decoder = executor.decoder
    given = [adapters[i % len(adapters)] for i in chosen] if adapters else []
    return verify_greedy(decoder.spec, decoder.weights, sequences, tolerance, executor.max_model_len, given)


def main(argv: list[str]) -> int:
    """Run the benchmark; 0 when every row was right, 1 when one was wrong, 2 for bad arguments."""
    args = parser().parse_args(argv)
    try:
        config = engine_config(args)
        began = time.perf_counter()
        executor = build_executor(config)
        if args.structured or args.json_schema:
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
    described = executor.describe()
    for name, value in described.items():
        print(f"# {name}: {value}")
    print(f"# start with all graphs: {start_seconds:.2f} s")
    tolerance = default_tolerance(executor.config)
    if args.epsilon:
        tolerance = replace(tolerance, one=args.epsilon)
    rows: list[Row] = []
    for n in (int(part) for part in args.n.split(",")):
        if args.uniform:
            least, most = (int(part) for part in args.uniform.split("-"))
            work = Work.uniform(n, least, most)
        else:
            work = Work.fixed(n, args.input_len, args.output_len)
        rows.append(measure(executor, work, key, tolerance, params, adapters))
        print_table(rows[-1:], header=len(rows) == 1)
        if args.json:
            args.json.write_text(json.dumps(as_json(described, rows, start_seconds), indent=1))
    if args.plot:
        save_plot(rows, args.plot)
    return 0 if all(row.verdict.passed for row in rows) else 1


def as_json(described: dict[str, str], rows: list[Row], start_seconds: float) -> dict[str, Any]:
    """Everything measured, with the engine's description and this process's peak memory in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "engine": described,
        "start_seconds": start_seconds,
        "peak_rss_mib": peak,
        "rows": [asdict(row) for row in rows],
    }
