"""`stoker bench offline`: what `LLM.generate` costs over the bare step loop that it drives.

Each N runs rounds of both in turn over one engine, with the same prompts, so that a card that slows down under load
slows them alike; a figure is that of the fastest round. Cost = wall of `generate` / wall of the bare loop - 1. Before a
row counts, tokens of both are compared with the reference's; a wrong row is printed as such and the exit status is 1.
With `--at-most PERCENT` a row that costs more is an exit status of 1 as well.
Invariants: greedy, to the asked length; what `generate` does for a caller (requests, texts, results) is all counted.
Knows nothing of HTTP.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from stoker_runtime.bench.engine_flags import SAMPLING_DEFAULTS, engine_config, parser
from stoker_runtime.bench.engine_mode import (
    SHORT_WARMUP_ABOVE,
    SHORT_WARMUP_TOKENS,
    check,
    introduce,
    tolerance_of,
    works,
)
from stoker_runtime.bench.rounds import GREEDY, Round, Work, prompts_of, run_round
from stoker_runtime.bench.table import print_line
from stoker_runtime.bench.verify import Tolerance, Verdict
from stoker_runtime.errors import ConfigError, StokerError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.offline.llm import LLM
from stoker_runtime.ranks.build import build_executor

ROUNDS = 5
COLUMNS = ("N", "bare loop tok/s", "generate tok/s", "cost", "output")
WIDTHS = (5, 16, 15, 8, 40)
NOT_TAKEN = (*SAMPLING_DEFAULTS, "uniform", "adapters", "structured", "json_schema", "plot")


@dataclass(frozen=True, slots=True)
class OfflineRow:
    """Both ways at one N: seconds of the fastest round of each, and whether their tokens are the reference's."""

    n: int
    tokens: int
    bare_s: float
    generate_s: float
    bare: Verdict
    generate: Verdict

    @property
    def cost(self) -> float:
        """What `generate` takes more than the bare loop, as a share of it."""
        return self.generate_s / self.bare_s - 1

    @property
    def passed(self) -> bool:
        """Whether the tokens of both are right."""
        return self.bare.passed and self.generate.passed


def generated(llm: LLM, work: Work, seed: int) -> Round:
    """`run_round` by `LLM.generate`: the same prompts. Its requests have no latencies of their own."""
    prompts = prompts_of(work, llm.engine.executor.vocab_size, seed)
    params = [replace(GREEDY, max_tokens=count, ignore_eos=True) for count in work.outputs]
    began = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    wall = time.perf_counter() - began
    return Round(wall, (), tuple(prompts), tuple(tuple(result.outputs[0].token_ids) for result in results))


def measure(llm: LLM, executor: Executor, work: Work, tolerance: Tolerance) -> OfflineRow:
    """Warm up, time both in turn, check. Raises EngineError when a request fails."""
    n, vocab = len(work.inputs), executor.vocab_size
    warm = work.capped(SHORT_WARMUP_TOKENS) if n > SHORT_WARMUP_ABOVE else work
    run_round(llm.engine, warm, vocab, 1)
    generated(llm, warm, 1)
    pairs = [(run_round(llm.engine, work, vocab, 2 + turn), generated(llm, work, 2 + turn)) for turn in range(ROUNDS)]
    bare, ours = pairs[-1]
    longest = executor.max_model_len
    return OfflineRow(
        n=n,
        tokens=sum(work.outputs),
        bare_s=min(each.wall for each, _ in pairs),
        generate_s=min(each.wall for _, each in pairs),
        bare=check(executor.decoder, longest, bare, tolerance),
        generate=check(executor.decoder, longest, ours, tolerance),
    )


def said(row: OfflineRow) -> str:
    """Whether a row is right, in the table."""
    wrong = [name for name, verdict in (("bare loop", row.bare), ("generate", row.generate)) if not verdict.passed]
    return f"WRONG ({', '.join(wrong)})" if wrong else f"right ({row.bare.positions + row.generate.positions} tokens)"


def show(row: OfflineRow) -> None:
    """One line of the table."""
    rates = (f"{row.tokens / wall:.1f}" for wall in (row.bare_s, row.generate_s))
    print_line((str(row.n), *rates, f"{row.cost:+.2%}", said(row)), WIDTHS)


def refuse(given: Sequence[str]) -> None:
    """Raise ConfigError for flags that ask for other requests than this bench has."""
    if given:
        flag = given[0].replace("_", "-")
        reason = "is not for this bench, whose requests are greedy ones of one length; leave it out."
        raise ConfigError(f"--{flag} {reason}", param=given[0])


def main(argv: list[str]) -> int:
    """Run the benchmark; 0 when every row was right and cheap enough, 1 when one was not, 2 for bad arguments."""
    flags = parser("stoker bench offline", "What LLM.generate costs over the bare step loop.")
    flags.add_argument("--at-most", type=float, metavar="PERCENT", help="exit with 1 where generate costs more")
    args = flags.parse_args(argv)
    try:
        refuse([name for name in NOT_TAKEN if getattr(args, name) != flags.get_default(name)])
        config = engine_config(args)
        if config.ranks > 1:
            raise ConfigError("This bench measures one rank.", param="tensor_parallel_size")
        executor = build_executor(config)
        executor.capture()
        described, tolerance = introduce(executor), tolerance_of(args, executor.config)
        rows = []
        with LLM.over(executor, executor.config) as llm:
            print_line(COLUMNS, WIDTHS)
            for work in works(args):
                rows.append(measure(llm, executor, work, tolerance))
                show(rows[-1])
    except StokerError as error:
        sys.stderr.write(f"stoker bench: {error.message}\n")
        return 2
    if args.json:
        told = [asdict(row) | {"cost": row.cost, "passed": row.passed} for row in rows]
        args.json.write_text(json.dumps({"engine": described, "rows": told}, indent=1))
    dear = args.at_most is not None and any(row.cost * 100 > args.at_most for row in rows)
    return 0 if all(row.passed for row in rows) and not dear else 1
