"""`stoker bench drafts`: what a step that verifies drafts costs, and what drafts bring for texts of several kinds.

Costs: rounds of random prompts in which every step verifies k drafts a sequence, found or not, against rounds without;
the time of a step is that of the round, less the same round with one token, over its steps. Gains: the same requests
with drafts and without, at the engine's own pace, by each way to draft that is named, n-grams and suffixes where none
is. A real model continues real source text (`--text`, Python's own modules by default): a copy of what its prompt holds
("copied"), a copy with a name changed ("renamed"), lines picked from a listing ("extracted"), and text that nothing in
the prompt foretells ("new"). These come from PLACES places of the text at least, N at a time. Every model gets random
prompts, and draws text of them that nothing at all foretells ("drawn"). Both sides get the same prompts. A text that is
another one with drafts is checked against the reference, as `stoker bench engine` checks: rounding may choose between
two tokens, and a batch-invariant engine may not even do that. Of drawn texts it is said how many are the same.
Invariants: the step loop measured is the one that serves; an engine is gone before the next one is made, each of which
takes all of a device. Knows nothing of how drafts are found.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stoker_runtime.bench.drafts_texts import KINDS, Prompt, read_sources, real_prompts
from stoker_runtime.bench.engine_flags import engine_config, parser, refuse_shared_prefix
from stoker_runtime.bench.engine_mode import VERIFIED_PROMPTS, default_tolerance
from stoker_runtime.bench.rounds import GREEDY, random_prompts, run_together
from stoker_runtime.bench.table import print_line
from stoker_runtime.bench.verify import UNCHECKED, Verdict, verify_greedy
from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.pace import Pace, RowPace
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import StokerError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.text.tokenizer import Tokenizer

NGRAM = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 5, "prompt_lookup_min": 2}'
SUFFIX = '{"method": "suffix"}'
RANDOM, DRAWN = "random", "drawn"
DRAWN_TEMPERATURE = 2.0
"""At which text has no order that drafts could find."""
ROUNDS = 3
MOST_ROUNDS = 12
"""Tries at ROUNDS that capture no graph, which takes a server some 40 ms once."""
COSTED_INPUT, COSTED_OUTPUT = 128, 128
"""Tokens, at most, of the prompts and texts by which steps are timed."""
PLACES = 8
"""At one place or another a text is easier to foretell than on the whole."""
COLUMNS = ("N", "text", "drafts", "off tok/s", "on tok/s", "ratio", "accepted", "length", "output")
WIDTHS = (4, 10, 22, 10, 10, 6, 9, 7, 44)


class Forced(Pace):
    """Takes the same k for every sequence, whatever it costs and brings."""

    k = 0

    def choose(self, rows: Sequence[RowPace | None], *, changed: bool) -> tuple[int, tuple[int, ...]]:
        """`k`, if the verification has room for it."""
        k = self.k if self._fits(len(rows), self.k) else 0
        return k, tuple(k if row is not None else 0 for row in rows)


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a step of `n` sequences that verifies `k` drafts of each, and plain steps that it is worth."""

    n: int
    k: int
    step_ms: float
    plain: float


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one kind, `n` of them submitted together at a time, and how tokens are chosen."""

    kind: str
    n: int
    prompts: tuple[Prompt, ...]
    params: SamplingParams = GREEDY


@dataclass(frozen=True, slots=True)
class Gain:
    """`texts` of one kind, `n` at a time: tokens a second without and with drafts, and what came of these.

    `verified` counts sequences' verifications that had drafts, `offered` and `accepted` these. `same` texts are those
    without drafts; `verdict` is on the others.
    """

    n: int
    texts: int
    kind: str
    drafts: str
    off_tok_s: float
    on_tok_s: float
    verified: int
    offered: int
    accepted: int
    same: int
    verdict: Verdict
    bound: bool
    """Whether all texts have to be the same."""

    @property
    def ratio(self) -> float:
        """With drafts against without."""
        return self.on_tok_s / self.off_tok_s

    @property
    def acceptance(self) -> float:
        """The share of drafts that was accepted."""
        return self.accepted / max(self.offered, 1)

    @property
    def length(self) -> float:
        """Tokens of a verification that had drafts: those accepted, and the one that any step gives."""
        return 1 + self.accepted / max(self.verified, 1)

    @property
    def passed(self) -> bool:
        """No text is wrong, as far as texts were checked."""
        return self.same == self.texts or (not self.bound and (self.verdict == UNCHECKED or self.verdict.passed))

    def as_json(self) -> dict[str, Any]:
        """Every figure by its name."""
        derived = ("ratio", "acceptance", "length", "passed")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True, slots=True)
class Timed:
    """A round: its seconds and steps, what was verified, offered and accepted, and the text that each request got."""

    seconds: float
    steps: int
    verified: int
    offered: int
    accepted: int
    outputs: tuple[Prompt, ...]


def run(loop: StepLoop, case: Case, count: int) -> Timed:
    """`count` tokens of each prompt, each with a seed of its own. Raises EngineError for a request that fails."""
    before, seconds, sequences = loop.stats(), 0.0, []
    asked = [
        Request(str(i), prompt, replace(case.params, max_tokens=count, seed=i)) for i, prompt in enumerate(case.prompts)
    ]
    for start in range(0, len(asked), case.n):
        took, found, _ = run_together(loop, asked[start : start + case.n])
        seconds += took
        sequences += found
    after = loop.stats()
    return Timed(
        seconds, after.steps - before.steps, after.drafts - before.drafts, after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
        tuple(tuple(each.tokens[each.prompt_length :]) for each in sequences),
    )  # fmt: skip


def costs(executor: Executor, ns: Sequence[int], input_len: int, output_len: int) -> list[Cost]:
    """Steps of each k that fits, of each N. The executor drafts."""
    loop = StepLoop(executor, executor.config)
    speculation = loop.scheduler.speculation
    assert speculation is not None
    pace = speculation.pace
    forced = Forced(max(pace.ladder), executor.verify_tokens)
    speculation.pace = forced
    found: list[Cost] = []
    for n in ns:
        plain = 0.0
        for k in (0, *pace.ladder):
            forced.k = k
            if k and not forced._fits(n, k):
                continue
            cases = [
                Case(RANDOM, n, tuple(random_prompts([input_len] * n, executor.vocab_size, seed)))
                for seed in range(ROUNDS + 1)
            ]
            run(loop, cases[0], output_len)  # a shape's second step captures its graph
            times = []
            for each in cases[1:]:
                first, whole = run(loop, each, 1), run(loop, each, output_len)
                times.append((whole.seconds - first.seconds) / max(1, whole.steps - first.steps))
            step = statistics.median(times)
            plain = step if k == 0 else plain
            found.append(Cost(n, k, step * 1e3, step / plain))
    return found


def give_back() -> None:
    """Free what an engine held that is gone: another one takes all of a device that is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed_cases(executor: Executor, cases: Sequence[Case], output_len: int) -> list[Timed]:
    """The median round of each case, after one more, among those that captured no graph; all, where too many did."""
    loop, found = StepLoop(executor, executor.config), []
    for case in cases:
        timed: list[Timed] = []
        quiet: list[Timed] = []
        run(loop, case, output_len)
        while len(quiet) < ROUNDS and len(timed) < MOST_ROUNDS:
            captured = executor.graphs.captured
            timed.append(run(loop, case, output_len))
            quiet += timed[-1:] if executor.graphs.captured == captured else []
        counted = sorted(quiet if len(quiet) == ROUNDS else timed, key=lambda each: each.seconds)
        found.append(counted[len(counted) // 2])
    return found


def without_drafts(config: EngineConfig, cases: Sequence[Case], output_len: int) -> list[Timed]:
    """Each case by an engine that drafts nothing, which is gone afterwards."""
    give_back()
    executor = build_executor(replace(config, speculative_config=""))
    try:
        executor.capture()
        described = executor.describe()
        print("# " + ", ".join(f"{name}: {described[name]}" for name in ("model", "device", "dtype", "quantization")))
        return timed_cases(executor, cases, output_len)
    finally:
        executor.close()


def with_drafts(
    config: EngineConfig, cases: Sequence[Case], plain: Sequence[Timed], output_len: int, costed: Sequence[int] = ()
) -> tuple[list[Cost], list[Gain]]:
    """Steps of each of `costed` sequences, and each case beside `plain`, by an engine that is gone afterwards."""
    give_back()
    executor = build_executor(config)
    try:
        executor.capture()
        found = costs(executor, costed, min(len(cases[0].prompts[0]), COSTED_INPUT), min(output_len, COSTED_OUTPUT))
        drafted = timed_cases(executor, cases, output_len)
        rows = zip(cases, plain, drafted, strict=True)
        return found, [gain(executor, case, off, on) for case, off, on in rows]
    finally:
        executor.close()


def gain(executor: Executor, case: Case, off: Timed, on: Timed) -> Gain:
    """What drafts brought for a case; greedy texts that they changed are checked."""
    config = executor.config
    texts = zip(case.prompts, off.outputs, on.outputs, strict=True)
    changed = [(prompt, drafted) for prompt, plain, drafted in texts if plain != drafted]
    verdict = UNCHECKED
    if config.ranks == 1 and case.params == GREEDY:  # of several, each has a part of the weights
        decoder, few = executor.decoder, changed[:VERIFIED_PROMPTS]
        tolerance = default_tolerance(config)
        verdict = verify_greedy(decoder.spec, decoder.weights, few, tolerance, executor.max_model_len)
    tokens = sum(map(len, off.outputs))
    return Gain(
        case.n, len(case.prompts), case.kind, str(executor.drafting), tokens / off.seconds, tokens / on.seconds,
        on.verified, on.offered, on.accepted, len(case.prompts) - len(changed), verdict, config.batch_invariant,
    )  # fmt: skip


def print_gains(gains: Sequence[Gain]) -> None:
    """A table; a ratio is shown only beside texts that are right."""
    print_line(COLUMNS, WIDTHS)
    for each in gains:
        output = f"{each.same} of {each.texts} texts the same"
        if each.verdict != UNCHECKED:
            ties, wrong = f"{each.verdict.ties} ties", f"{each.verdict.wrong} tokens wrong"
            output += f", {ties if each.verdict.passed else wrong} <= {each.verdict.worst:.2f}"
        cells = (
            str(each.n), each.kind, each.drafts, f"{each.off_tok_s:,.0f}", f"{each.on_tok_s:,.0f}",
            f"{each.ratio:.2f}" if each.passed else "-", f"{each.acceptance:.0%}" if each.offered else "-",
            f"{each.length:.2f}" if each.verified else "-", output if each.passed else f"WRONG: {output}",
        )  # fmt: skip
        print_line(cells, WIDTHS)


def flags() -> argparse.ArgumentParser:
    """The flags of `stoker bench engine` that say which model, and some of its own."""
    found = parser()
    found.prog, found.description = "stoker bench drafts", __doc__.splitlines()[0] if __doc__ else ""
    found.set_defaults(n="1,16", input_len=512, output_len=256, max_num_seqs=64)
    found.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE",
        help="UTF-8 texts to copy from, one after the other (default: some of Python's modules)",
    )  # fmt: skip
    return found


def cases_of(args: argparse.Namespace, config: EngineConfig, ns: Sequence[int], vocab: int) -> list[Case]:
    """Random prompts, text drawn after them, and of a real model that of every kind, for each N. Raises ConfigError for
    too short a text.
    """
    drawn = replace(GREEDY, temperature=DRAWN_TEMPERATURE)
    cases = [
        Case(kind, n, tuple(random_prompts([args.input_len] * n, vocab, n)), params)
        for kind, params in ((RANDOM, GREEDY), (DRAWN, drawn))
        for n in ns
    ]
    if args.model:
        tokenizer, text = Tokenizer.load(config.tokenizer or config.model), read_sources(args.text)
        for kind in KINDS:
            for n in ns:
                count = -(-PLACES // n) * n
                cases.append(Case(kind, n, tuple(real_prompts(kind, count, args.input_len, text, tokenizer))))
    return cases


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 for a text that is wrong, 2 for bad arguments."""
    args = flags().parse_args(argv)
    costed: list[Cost] = []
    gains: list[Gain] = []
    try:
        refuse_shared_prefix(args, "stoker bench drafts, which has prompts of its own")
        config = engine_config(args)
        asked = [config.speculative_config] if config.speculative_config else [SUFFIX, NGRAM]
        ns = [int(part) for part in args.n.split(",")]
        cases = cases_of(args, config, ns, build_spec(read_source(config.model)).vocab)
        plain = without_drafts(config, cases, args.output_len)
        for at, speculative in enumerate(asked):
            drafting = replace(config, speculative_config=speculative)
            costs_found, found = with_drafts(drafting, cases, plain, args.output_len, () if at else ns)
            for cost in costs_found:
                print(f"N={cost.n:<4} k={cost.k:<3} {cost.step_ms:8.3f} ms a step, {cost.plain:5.2f} plain", flush=True)
            costed += costs_found
            print_gains(found)
            gains += found
            if args.json:
                rows = {"costs": [asdict(each) for each in costed], "gains": [each.as_json() for each in gains]}
                args.json.write_text(json.dumps(rows, indent=1))
    except StokerError as error:
        sys.stderr.write(f"stoker bench drafts: {error.message}\n")
        return 2
    return 0 if all(each.passed for each in gains) else 1
