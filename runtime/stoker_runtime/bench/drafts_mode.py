"""`stoker bench drafts`: what a step that verifies drafts costs, and what drafts bring for texts of several kinds.

Costs: rounds of random prompts in which every step verifies k drafts a sequence, found or not, against rounds without;
the time of a step is that of the round, less the same round with one token, over its steps. Gains: the same requests
with drafts and without, at the engine's own pace. A real model continues real source text (`--text`, Python's own
modules by default): a copy of what its prompt holds ("copied"), a copy with a name changed ("renamed"), lines picked
from a listing ("extracted"), and text that nothing in the prompt foretells ("new"). Every model gets random prompts.
Invariants: the step loop measured is the one that serves; both sides of a gain get the same prompts, and how many texts
are the same on both is said. Knows nothing of how drafts are found.
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

import torch

from stoker_runtime.bench.engine_flags import engine_config, parser
from stoker_runtime.bench.rounds import GREEDY, random_prompts, run_together
from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.pace import Pace, RowPace
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError, StokerError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Request
from stoker_runtime.text.tokenizer import Tokenizer

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2}'
RANDOM = "random"
KINDS = ("copied", "renamed", "extracted", "new")
MODULES = ("textwrap", "bisect", "heapq", "shlex", "string", "csv", "queue", "sched")
BEGUN = 40
"""Tokens of a copy that the prompt holds already."""
ROUNDS = 3

Prompt = tuple[int, ...]


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
class Gain:
    """`n` sequences of one kind of text: tokens a second without and with drafts, and what came of these."""

    n: int
    kind: str
    off_tok_s: float
    on_tok_s: float
    offered: int
    accepted: int
    same: int
    """Texts that are the same on both sides."""

    @property
    def ratio(self) -> float:
        """With drafts against without."""
        return self.on_tok_s / self.off_tok_s


@dataclass(frozen=True, slots=True)
class Timed:
    """A round: its seconds, the engine's steps in it, drafts offered and accepted, and what each request got."""

    seconds: float
    steps: int
    offered: int
    accepted: int
    outputs: tuple[Prompt, ...]


def run(loop: StepLoop, prompts: Sequence[Prompt], count: int) -> Timed:
    """`count` tokens of each prompt, all submitted together. Raises EngineError for a request that fails."""
    before, asked = loop.stats(), replace(GREEDY, max_tokens=count)
    seconds, sequences, _ = run_together(loop, (Request(str(i), prompt, asked) for i, prompt in enumerate(prompts)))
    after = loop.stats()
    return Timed(
        seconds, after.steps - before.steps, after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
        tuple(tuple(each.tokens[each.prompt_length :]) for each in sequences),
    )  # fmt: skip


def read_sources(path: Path | None) -> str:
    """The text of a file, or of some of Python's modules. Raises ConfigError naming the flag."""
    import importlib.util

    try:
        if path is not None:
            return path.read_text(encoding="utf-8")
        found = [importlib.util.find_spec(name) for name in MODULES]
        return "\n".join(Path(spec.origin).read_text(encoding="utf-8") for spec in found if spec and spec.origin)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}.", param="text") from error


def real_prompts(kind: str, n: int, length: int, text: str, tokenizer: Tokenizer) -> list[Prompt]:
    """`n` prompts of about `length` tokens from other places of `text`. Raises ConfigError for too short a text."""
    lines = text.splitlines()
    step = max(1, len(lines) // (n + 1))
    prompts = []
    for i in range(n):
        piece = tokenizer.decode(tokenizer.encode("\n".join(lines[i * step :]))[:length])
        if len(tokenizer.encode(piece)) < length // 2:
            raise ConfigError(f"--text is too short for {n} prompts of {length} tokens.", param="text")
        prompts.append(tuple(tokenizer.encode(_asked(kind, piece, tokenizer))))
    return prompts


def _asked(kind: str, piece: str, tokenizer: Tokenizer) -> str:
    if kind == "new":
        return piece
    if kind == "extracted":
        lines = [line for line in piece.splitlines() if line.strip()]
        return "\n".join(f"{i}: {line}" for i, line in enumerate(lines)) + "\n\nThe lines in their order:\n0: "
    told, copy = "The same text again", piece
    if kind == "renamed":
        words = [word for word in piece.split() if word.isidentifier() and len(word) > 3]
        old = statistics.mode(words) if words else "self"
        told, copy = f"The same text with {old} renamed to {old}_2", piece.replace(old, f"{old}_2")
    begun = tokenizer.decode(tokenizer.encode(copy)[:BEGUN])
    return f"```\n{piece}\n```\n\n{told}:\n\n```\n{begun}"


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
            prompts = [random_prompts([input_len] * n, executor.vocab_size, seed) for seed in range(ROUNDS + 1)]
            run(loop, prompts[0], output_len)  # a shape's second step captures its graph
            times = []
            for each in prompts[1:]:
                first, whole = run(loop, each, 1), run(loop, each, output_len)
                times.append((whole.seconds - first.seconds) / max(1, whole.steps - first.steps))
            step = statistics.median(times)
            plain = step if k == 0 else plain
            found.append(Cost(n, k, step * 1e3, step / plain))
    return found


def measure_costs(config: EngineConfig, ns: Sequence[int], input_len: int, output_len: int) -> tuple[int, list[Cost]]:
    """The vocabulary's size, and `costs` of an engine of this configuration, which is gone afterwards."""
    executor = build_executor(config)
    try:
        executor.capture()
        described = executor.describe()
        print("# " + ", ".join(f"{name}: {described[name]}" for name in ("model", "device", "dtype")))
        return executor.vocab_size, costs(executor, ns, input_len, output_len)
    finally:
        executor.close()


def give_back() -> None:
    """Free what an engine held that is gone: another one takes all of a device that is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def outputs_of(config: EngineConfig, rounds: Sequence[Sequence[Prompt]], output_len: int) -> list[Timed]:
    """The median round of each list of prompts, by an engine of this configuration that is made for it."""
    executor = build_executor(config)
    executor.capture()
    loop = StepLoop(executor, config)
    try:
        found = []
        for prompts in rounds:
            timed = [run(loop, prompts, output_len) for _ in range(ROUNDS + 1)][1:]
            found.append(sorted(timed, key=lambda each: each.seconds)[ROUNDS // 2])
        return found
    finally:
        executor.close()


def gains(config: EngineConfig, cases: Sequence[tuple[str, Sequence[Prompt]]], output_len: int) -> list[Gain]:
    """Each case by an engine without drafts and by one with them."""
    rounds = [prompts for _, prompts in cases]
    give_back()
    off = outputs_of(replace(config, speculative_config=""), rounds, output_len)
    give_back()
    on = outputs_of(config, rounds, output_len)
    found = []
    for (kind, prompts), without, drafted in zip(cases, off, on, strict=True):
        tokens = len(prompts) * output_len
        same = sum(a == b for a, b in zip(without.outputs, drafted.outputs, strict=True))
        rates = (tokens / without.seconds, tokens / drafted.seconds)
        found.append(Gain(len(prompts), kind, *rates, drafted.offered, drafted.accepted, same))
    return found


def flags() -> argparse.ArgumentParser:
    """The flags of `stoker bench engine` that say which model, and some of its own."""
    found = parser()
    found.prog, found.description = "stoker bench drafts", __doc__.splitlines()[0] if __doc__ else ""
    found.set_defaults(speculative_config=NGRAM, n="1,16", input_len=512, output_len=256, max_num_seqs=64)
    found.add_argument("--text", type=Path, help="a UTF-8 text to copy from (default: some of Python's modules)")
    return found


def main(argv: list[str]) -> int:
    """Run the benchmark; 2 for bad arguments."""
    args = flags().parse_args(argv)
    try:
        config = engine_config(args)
        if not config.speculative_config:
            raise ConfigError("--speculative-config says what drafts.", param="speculative_config")
        ns = [int(part) for part in args.n.split(",")]
        vocab, found = measure_costs(config, ns, min(args.input_len, 128), min(args.output_len, 128))
        for cost in found:
            print(f"N={cost.n:<4} k={cost.k:<3} {cost.step_ms:8.3f} ms a step, {cost.plain:5.2f} plain", flush=True)
        cases = [(RANDOM, random_prompts([args.input_len] * n, vocab, n)) for n in ns]
        if args.model:
            tokenizer, text = Tokenizer.load(config.tokenizer or config.model), read_sources(args.text)
            cases += [(kind, real_prompts(kind, n, args.input_len, text, tokenizer)) for kind in KINDS for n in ns]
        brought = gains(config, cases, args.output_len)
    except StokerError as error:
        sys.stderr.write(f"stoker bench drafts: {error.message}\n")
        return 2
    for gain in brought:
        print(
            f"N={gain.n:<4} {gain.kind:<10} {gain.off_tok_s:9,.0f} tok/s without drafts, {gain.on_tok_s:9,.0f} with:"
            f" {gain.ratio:.2f}; {gain.accepted} of {gain.offered} accepted; {gain.same} of {gain.n} texts the same"
        )
    if args.json:
        rows = {"costs": [asdict(each) for each in found], "gains": [asdict(each) for each in brought]}
        args.json.write_text(json.dumps(rows, indent=1))
    return 0
