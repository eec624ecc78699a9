"""`stoker bench sampling`: what each way to choose tokens costs, against greedy rounds of the same engine.

Each N runs rounds of every way in turn, greedy ones among them, so that a card that slows down under load slows them
alike; a way's figure is its fastest round. Cost = 1 - tok/s / greedy tok/s. Before a row counts, tokens of a greedy
round are compared with the reference's and those of a round of each way with what the reference lets be drawn, and how
often; a wrong row is printed as such and the exit status is 1.
Invariants: the step loop measured is the one that serves; requests of one round have the same parameters and a seed
each. Knows nothing of HTTP, grammars or log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stoker_runtime.bench.engine_flags import SAMPLING_DEFAULTS, engine_config, parser
from stoker_runtime.bench.engine_mode import (
    SHORT_WARMUP_ABOVE,
    SHORT_WARMUP_TOKENS,
    VERIFIED_PROMPTS,
    check,
    introduce,
    tolerance_of,
    works,
)
from stoker_runtime.bench.rounds import GREEDY, Round, Work, run_round
from stoker_runtime.bench.sampling.check import Drawn, verify_sampled
from stoker_runtime.bench.table import print_line
from stoker_runtime.bench.verify import Tolerance, Verdict
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError, StokerError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import SamplingParams

ROUNDS = 3
BIASED = 16
"""Tokens that a request with a bias moves."""
COLUMNS = ("N", "tokens chosen by", "tok/s", "TPOT ms", "cost", "output")
WIDTHS = (5, 30, 9, 8, 7, 58)
# What no request of this bench may ask for: its ways are its own, and one engine has to hold them all.
NOT_TAKEN = (*SAMPLING_DEFAULTS, "uniform", "adapters", "structured", "json_schema", "plot")


@dataclass(frozen=True, slots=True)
class Way:
    """A way to choose tokens, and its name in the table."""

    name: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One way at one N: tokens a second, its cost against `greedy_tok_s`, and TPOT in milliseconds: (wall - that of a
    greedy round of one token) / (output length - 1).
    """

    n: int
    way: str
    tok_s: float
    tpot_ms: float
    greedy_tok_s: float
    verdict: Verdict | Drawn

    @property
    def cost(self) -> float:
        """The share of the greedy throughput that this way takes; below zero where it was faster."""
        return 1 - self.tok_s / self.greedy_tok_s


def ways(vocab: int, seed: int = 0) -> list[Way]:
    """Greedy first; then filters alone and together, penalties, and a bias of random tokens of the vocabulary."""
    drawn = random.Random(seed)
    warm = SamplingParams(temperature=0.7, ignore_eos=True)
    nucleus = replace(warm, top_p=0.9)
    ids = drawn.sample(range(vocab), min(BIASED, vocab))
    bias = tuple((token, drawn.uniform(-4.0, 4.0)) for token in ids)
    penalties: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    return [
        Way("greedy", GREEDY),
        Way("temperature 0.7", warm),
        Way("top-k 50", replace(warm, top_k=50)),
        Way("top-p 0.9", nucleus),
        Way("min-p 0.05", replace(warm, min_p=0.05)),
        Way("top-k, top-p and min-p", replace(nucleus, top_k=50, min_p=0.05)),
        Way("top-p and bias", replace(nucleus, logit_bias=bias)),
        Way("top-p and penalties", replace(nucleus, **penalties)),
        Way("top-p, penalties and bias", replace(nucleus, logit_bias=bias, **penalties)),
    ]


class SamplingBench:
    """Rounds of one executor."""

    def __init__(self, executor: Executor, tolerance: Tolerance) -> None:
        self._executor = executor
        self._loop = StepLoop(executor, executor.config)
        self._tolerance = tolerance

    def measure(self, work: Work, chosen: Sequence[Way]) -> list[SampledRow]:
        """A row of each way, of which the first is greedy. Raises EngineError when a request fails."""
        n = len(work.inputs)
        warm = work.capped(SHORT_WARMUP_TOKENS) if n > SHORT_WARMUP_ABOVE else work
        for way in chosen:
            self._round(warm, way, 1)
        rounds = [[self._round(work, way, 2 + turn) for way in chosen] for turn in range(ROUNDS)]
        prefill = min(self._round(work.capped(1), chosen[0], 2 + turn).wall for turn in range(ROUNDS))
        tokens, longest = sum(work.outputs), max(work.outputs)
        walls = [min(each.wall for each in of_way) for of_way in zip(*rounds, strict=True)]
        return [
            SampledRow(
                n=n, way=way.name, tok_s=tokens / wall, greedy_tok_s=tokens / walls[0],
                tpot_ms=(wall - prefill) / max(longest - 1, 1) * 1e3,
                verdict=self._verdict(way, measured),
            )
            for way, wall, measured in zip(chosen, walls, rounds[-1], strict=True)
        ]  # fmt: skip

    def _round(self, work: Work, way: Way, seed: int) -> Round:
        return run_round(self._loop, work, self._executor.vocab_size, seed, way.params)

    def _verdict(self, way: Way, measured: Round) -> Verdict | Drawn:
        decoder, longest = self._executor.decoder, self._executor.max_model_len
        if way.params.temperature == 0.0:
            return check(decoder, longest, measured, self._tolerance)
        some = list(zip(measured.prompts, measured.outputs, strict=True))[:VERIFIED_PROMPTS]
        most = self._tolerance.of(decoder.spec.num_layers, decoder.spec.hidden).one
        return verify_sampled(decoder.spec, decoder.weights, some, way.params, most, longest)


def said(verdict: Verdict | Drawn) -> str:
    """In the table."""
    if isinstance(verdict, Verdict):
        return f"{'right' if verdict.passed else 'WRONG'} ({verdict.positions} tokens, {verdict.wrong} wrong)"
    drift = f"log p off by {verdict.drift:+.3f} ± {verdict.deviation:.3f}"
    words = f"{verdict.positions} tokens, {verdict.outside} filtered, {drift}"
    return f"{'right' if verdict.passed else 'WRONG'} ({words})"


def print_rows(rows: Iterable[SampledRow]) -> None:
    """Each row in its line."""
    for row in rows:
        cells = (row.n, row.way, f"{row.tok_s:,.0f}", f"{row.tpot_ms:.2f}", f"{row.cost:.1%}", said(row.verdict))
        print_line(cells, WIDTHS)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of `stoker bench engine` that say what is measured. Raises ConfigError for one of how it is sampled."""
    flags = parser("stoker bench sampling", "What each way to choose tokens costs, beside greedy choice.")
    args = flags.parse_args(argv)
    for name in NOT_TAKEN:
        if getattr(args, name) != flags.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is not for this bench, which has ways of its own.", param=name)
    return args


def main(argv: list[str]) -> int:
    """Run the benchmark; 0 when every row was right, 1 when one was wrong, 2 for bad arguments."""
    try:
        args = arguments(argv)
        config = engine_config(args)
        if config.ranks > 1:
            raise ConfigError("This bench measures one rank.", param="tensor_parallel_size")
        executor = build_executor(config)
        executor.capture()
        return report(args, executor)
    except StokerError as error:
        sys.stderr.write(f"stoker bench: {error.message}\n")
        return 2


def report(args: argparse.Namespace, executor: Executor) -> int:
    """Measure every N, print the table, write the file; 1 when an output was wrong."""
    described = introduce(executor)
    bench = SamplingBench(executor, tolerance_of(args, executor.config))
    chosen = ways(executor.vocab_size)
    rows: list[SampledRow] = []
    print_line(COLUMNS, WIDTHS)
    for work in works(args):
        rows += bench.measure(work, chosen)
        print_rows(rows[-len(chosen) :])
        if args.json:
            told = [{**asdict(row), "cost": row.cost, "passed": row.verdict.passed} for row in rows]
            args.json.write_text(json.dumps({"engine": described, "rows": told}, indent=1))
    return 0 if all(row.verdict.passed for row in rows) else 1
