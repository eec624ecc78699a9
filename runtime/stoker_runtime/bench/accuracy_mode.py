"""`stoker bench accuracy`: what a quantization costs, on a real model and a real text.

The engine reads the same text twice, as the checkpoint is and as the flags ask or as another file has it, and compares
the log-probabilities of every position: how often both find the same best token, by how much they differ, and both
perplexities.
Invariants: both runs are the engine that serves; both see the same tokens in the same windows.
Knows nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, StokerError
from stoker_runtime.fetch.by_name import located
from stoker_runtime.offline.llm import LLM
from stoker_runtime.outputs import RequestOutput
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import SamplingParams, TokenLogprobs

TOP = 20


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How two runs over the same `positions` compare; log-probabilities in nats.

    `agreement`: the fraction of positions with the same best token. `rms_error`, `worst_error`: over the
    tokens that both runs count among their best 20. `mean_shift`: the mean absolute change of the text's own token.
    """

    positions: int
    agreement: float
    rms_error: float
    worst_error: float
    mean_shift: float
    perplexity: float
    perplexity_plain: float


def compare(plain: Sequence[TokenLogprobs], changed: Sequence[TokenLogprobs]) -> Accuracy:
    """Compare position by position. Raises ValueError when there are none or their numbers differ."""
    if not plain:
        raise ValueError("there is nothing to compare")
    same = 0
    shift = squares = worst = 0.0
    compared = 0
    for one, other in zip(plain, changed, strict=True):
        same += one.top[0][0] == other.top[0][0]
        shift += abs(one.logprob - other.logprob)
        known = dict(other.top)
        for error in (known[token] - logprob for token, logprob in one.top if token in known):
            squares += error * error
            worst = max(worst, abs(error))
            compared += 1
    return Accuracy(
        positions=len(plain),
        agreement=same / len(plain),
        rms_error=math.sqrt(squares / compared) if compared else math.inf,
        worst_error=worst if compared else math.inf,
        mean_shift=shift / len(plain),
        perplexity=_perplexity(changed),
        perplexity_plain=_perplexity(plain),
    )


def _perplexity(entries: Sequence[TokenLogprobs]) -> float:
    return math.exp(-sum(each.logprob for each in entries) / len(entries))


def parser() -> argparse.ArgumentParser:
    """The flags of `stoker bench accuracy`."""
    flags = argparse.ArgumentParser(prog="stoker bench accuracy", description=__doc__.split("\n")[0])
    flags.add_argument("model", help="ORG/NAME of the hub, a folder or .gguf file")
    flags.add_argument("--other", default="", help="of the second run: the same model in another file")
    flags.add_argument("--quantization", default="auto", help="of the second run, e.g. fp8; the first has none")
    flags.add_argument("--isq", default="none", help="of the second run: fp8, w4, q8_0 or q4k")
    flags.add_argument("--quantize-head", default="none", help="of the second run, e.g. fp8")
    flags.add_argument("--quantize-embedding", default="none", help="of the second run, e.g. q8_0")
    flags.add_argument("--kv-cache-dtype", default="auto", help="of the second run; the first has the model's")
    flags.add_argument("--dtype", default="auto", help="of both runs")
    flags.add_argument("--device", default="auto")
    flags.add_argument("--text", type=Path, help="a UTF-8 text (default: the topics of Python's own documentation)")
    flags.add_argument("--tokens", type=int, default=8192, help="how much of it to read")
    flags.add_argument("--window", type=int, default=512, help="tokens that are read together")
    flags.add_argument("--least-agreement", type=float, default=0.0, help="exit with status 1 below this fraction")
    flags.add_argument("--json", type=Path, help="write the figures here")
    return flags


def read_text(path: Path | None) -> str:
    """The text of a file, or of Python's documentation. Raises ConfigError naming the flag."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}.", param="text") from error


def score(config: EngineConfig, text: str, tokens: int, window: int) -> tuple[list[int], list[TokenLogprobs]]:
    """The text's first `tokens` tokens, and the log-probabilities of all but the first of each window.

    Raises ConfigError for a text of fewer than two tokens.
    """
    with LLM.over(build_executor(config), config) as llm:
        ids = llm.tokenizer.encode(text)[:tokens]
        windows = [ids[start : start + window] for start in range(0, len(ids), window)]
        windows = [each for each in windows if len(each) > 1]
        if not windows:
            raise ConfigError("The text has fewer than two tokens.", param="text")
        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=TOP, ignore_eos=True)
        outputs = llm.generate(windows, asked, use_tqdm=sys.stderr.isatty())
        return ids, [each for output in outputs for each in _scored(output)]


def _scored(output: RequestOutput) -> list[TokenLogprobs]:
    """The log-probabilities of each token of a prompt but the first, with the likeliest beside it."""
    found: list[TokenLogprobs] = []
    for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
        if entry is not None:
            best = sorted(entry.items(), key=lambda item: item[1].rank)[:TOP]
            top = tuple((other, each.logprob) for other, each in best)
            found.append(TokenLogprobs(entry[token].logprob, entry[token].rank, top))
    return found


def run(args: argparse.Namespace) -> Accuracy:
    """Both runs. Raises ConfigError when the flags change nothing, or name sizes that cannot be."""
    defaults = (
        ("quantization", ("auto", "none")),
        ("isq", ("none",)),
        ("quantize_head", ("none",)),
        ("quantize_embedding", ("none",)),
        ("kv_cache_dtype", ("auto",)),
    )
    unchanged = all(getattr(args, name) in values for name, values in defaults)
    if unchanged and not args.other:
        raise ConfigError(
            "Name what to measure: --quantization, --isq, --quantize-head, --quantize-embedding, --kv-cache-dtype or "
            "--other.",
            param="quantization",
        )
    if args.window < 2 or args.tokens < 2:
        raise ConfigError("--window and --tokens must be at least 2.", param="window")
    text = read_text(args.text)
    plain = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.window + 1,
        enable_prefix_caching=False,
        quantization="none",
    )
    plain = located(plain, say=lambda text: print(f"# {text}", flush=True))
    changed = replace(
        plain,
        quantization=args.quantization,
        isq=args.isq,
        quantize_head=args.quantize_head,
        quantize_embedding=args.quantize_embedding,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    if args.other:
        changed = located(replace(changed, model=args.other), say=lambda text: print(f"# {text}", flush=True))
    (ids, one), (other_ids, two) = (score(each.validate(), text, args.tokens, args.window) for each in (plain, changed))
    if ids != other_ids:
        raise ConfigError(f"--other {args.other} reads the text as other tokens than {args.model}.", param="other")
    return compare(one, two)


def print_table(found: Accuracy, args: argparse.Namespace) -> None:
    """The figures, one a line, on standard output."""
    named = f"quantization {args.quantization}, KV cache {args.kv_cache_dtype}"
    named = named if args.isq == "none" else f"isq {args.isq}, KV cache {args.kv_cache_dtype}"
    named = named if args.quantize_head == "none" else f"{named}, head {args.quantize_head}"
    named = named if args.quantize_embedding == "none" else f"{named}, embedding {args.quantize_embedding}"
    named = f"{args.other}, {named}" if args.other else named
    lines = [
        ("positions", f"{found.positions:,}"),
        ("same best token", f"{found.agreement:.2%}"),
        ("log-probability error, rms", f"{found.rms_error:.4f}"),
        ("log-probability error, worst", f"{found.worst_error:.4f}"),
        ("change of the text's tokens, mean", f"{found.mean_shift:.4f}"),
        ("perplexity", f"{found.perplexity:.4f}"),
        ("perplexity, not quantized", f"{found.perplexity_plain:.4f}"),
    ]
    print(f"{args.model}: {named}")
    for name, value in lines:
        print(f"  {name:<36} {value:>12}")


def main(argv: list[str]) -> int:
    """Measure, print and write. Exit status 2 for a wrong argument, 1 for another error or too little agreement."""
    args = parser().parse_args(argv)
    try:
        found = run(args)
    except StokerError as error:
        print(f"stoker bench accuracy: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print_table(found, args)
    if args.json:
        args.json.write_text(json.dumps(asdict(found), indent=2) + "\n")
    if found.agreement < args.least_agreement:
        print(f"stoker bench accuracy: the agreement is below {args.least_agreement:.2%}", file=sys.stderr)
        return 1
    return 0
