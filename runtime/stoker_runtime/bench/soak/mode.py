"""`stoker bench soak`: minutes of mixed load, and proof that nothing is held, grows, slows or changes by it.

    1. a server is started, or one at --url is taken; each kind of request runs once
    2. the load: kinds and lengths mixed, 1 to --streams streams, for --seconds or --requests
    3. what the server holds afterwards, its memory, its gaps between tokens, seeded texts once more alone
    4. a server that was started is ended, and must end well

With --faults, processes are killed and hung and the disk is filled under load instead of steps 2 and 3.

Invariants: status 0 only where every finding held; a kind that the server at --url does not take is named and left out,
one of a server started here fails the run.
Knows nothing of how the server works: it sees answers, /load and /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker_runtime.bench.http_client import LoadError
from stoker_runtime.bench.http_load import find_model
from stoker_runtime.bench.soak.faults import FAULTS, Healed, run_faults, small_folder
from stoker_runtime.bench.soak.held import settled
from stoker_runtime.bench.soak.judge import (
    Bounds,
    Finding,
    judge_answers,
    judge_gaps,
    judge_held,
    judge_memory,
    judge_texts,
    verdict,
)
from stoker_runtime.bench.soak.kinds import KINDS, Kind
from stoker_runtime.bench.soak.load import Load, Plan, allow_sockets
from stoker_runtime.bench.soak.lone import differing_texts
from stoker_runtime.bench.soak.plot import save_plot
from stoker_runtime.bench.soak.server import TEMPLATE, Server
from stoker_runtime.bench.soak.tally import Tally
from stoker_runtime.bench.soak.visit import Facts, Full, Visit, Wrong, expect
from stoker_runtime.bench.soak.wire import GONE, Wire
from stoker_runtime.bench.start_mode import StartFailed
from stoker_runtime.errors import ConfigError

SETTLE_SECONDS = 60.0
FIRST_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Report:
    """What a soak found. `left_out`: kinds that the server does not take, with its words."""

    findings: list[Finding]
    left_out: dict[str, str]
    tally: Tally
    healed: list[Healed]

    @property
    def passed(self) -> bool:
        """Whether all that was looked at held."""
        return all(finding.held is not False for finding in self.findings)


def main(argv: list[str]) -> int:
    """Run `stoker bench soak`; 1 when something did not hold, 2 for flags that cannot work."""
    args = flags().parse_args(argv)
    # Whoever ends this program ends the server that it started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        check(args)
        report = soak(args)
    except ConfigError as error:
        sys.stderr.write(f"stoker bench soak: {error.message}\n")
        return 2
    except (StartFailed, LoadError) as error:
        sys.stderr.write(f"stoker bench soak: {error}\n")
        return 1
    if args.json:
        args.json.write_text(json.dumps(as_json(report), indent=1) + "\n")
    if args.plot:
        save_plot(report.tally, args.plot)
    print("\n".join(verdict(report.findings)))
    return 0 if report.passed else 1


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that cannot work together."""
    if bool(args.model) == bool(args.url):
        raise ConfigError("Name a model to serve, or --url of a server: exactly one of them.", param="model")
    if args.faults and args.url:
        raise ConfigError("--faults kills processes, so it takes a server that it starts: name a model.", param="url")
    if args.url and args.serve:
        raise ConfigError("--serve has flags of a server to start; --url names one that runs.", param="serve")
    if args.pid and not args.url:
        raise ConfigError("--pid names the process of the server at --url.", param="pid")
    for fault in args.faults:
        if fault not in FAULTS:
            raise ConfigError(f"{fault!r} is no fault; there are {', '.join(FAULTS)}", param="faults")
    if args.streams < 1 or args.seconds <= 0 or args.requests < 0:
        raise ConfigError("--streams and --seconds are above 0, --requests is 0 or more.", param="streams")
    allow_sockets(args.streams)


def soak(args: argparse.Namespace) -> Report:
    """The whole run. Raises StartFailed, ConfigError."""
    if args.url:
        return asyncio.run(under_load(args, args.url.rstrip("/"), args.pid or None, strict=False))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-soak-")))
        small = stack.enter_context(small_folder(folder)) if "fill-disk" in args.faults else None
        server = Server([*serve_flags(args, small or folder, folder), *args.serve], folder, small)
        stack.callback(server.close)
        server.start()
        server.wait_ready()
        print(f"# {server.lines()[-1]}", flush=True)
        if args.faults:
            return asyncio.run(under_faults(args, server, small))
        report = asyncio.run(under_load(args, server.url, server.pid, strict=True))
        status, left = server.stop()
        said = f"exit status {status}, {len(left)} processes left"
        troubles = [line for line in server.lines() if "ERROR" in line or "Traceback" in line]
        finding = Finding("end", status == 0 and not left and not troubles, "; ".join([said, *troubles[:3]]))
        show(finding)
        report.findings.append(finding)
        return report


def serve_flags(args: argparse.Namespace, files: Path, folder: Path) -> list[str]:
    """The flags of the server to start: batches are on, and a model of a shape has a chat template."""
    found = [args.model, "--batch-dir", str(files / "batches")]
    if args.model.startswith("shape:"):
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        found += ["--chat-template", str(template), "--tool-call-parser", "hermes"]
    return [*found, "--api-server-count", "2"] if args.faults else found


async def under_load(args: argparse.Namespace, url: str, pid: int | None, *, strict: bool) -> Report:
    """Steps 2 and 3 on a server that runs."""
    tally, facts = Tally(), await read_facts(url, args)
    kinds, left_out = await first_round(url, args.api_key, facts)
    findings = [Finding("kinds", not strict, f"{name} is not served: {why}") for name, why in left_out.items()]
    before = await settled(url, args.api_key, pid, None, SETTLE_SECONDS)
    plan = Plan(url, args.api_key, args.streams, args.seconds, args.requests, args.patience, args.seed, kinds=kinds)
    print(f"# {facts.model} at {url}: {', '.join(kinds)}; up to {args.streams} streams", flush=True)
    await Load(plan, facts, tally).run(lambda: pid)
    bounds = Bounds(args.growth, args.growth_mib, args.drift)
    findings += [
        judge_answers(tally),
        judge_memory("memory", tally.samples, bounds, lambda sample: sample.rss_mib),
        judge_memory("device memory", tally.samples, bounds, lambda sample: sample.device_mib),
        judge_gaps(tally.gaps, tally.late, bounds),
    ]
    try:
        findings.append(judge_held(before, await settled(url, args.api_key, pid, before, SETTLE_SECONDS)))
        differing = await differing_texts(url, args.api_key, tally.texts)
        findings.append(judge_texts(differing, len(tally.texts), args.differing))
    except (Wrong, Full, *GONE) as error:
        findings.append(Finding("afterwards", False, f"the server did not answer as it should: {said_of(error)}"))
    for finding in findings:
        show(finding)
    return Report(findings, left_out, tally, [])


def said_of(error: BaseException) -> str:
    """The error's words, or its kind where it has none."""
    return str(error) or type(error).__name__


async def under_faults(args: argparse.Namespace, server: Server, small: Path | None) -> Report:
    """The faults, one after the other, under load."""
    tally, facts = Tally(), await read_facts(server.url, args)
    kinds, left_out = await first_round(server.url, args.api_key, facts)
    findings = [Finding("kinds", False, f"{name} is not served: {why}") for name, why in left_out.items()]
    plan = Plan(server.url, args.api_key, args.streams, 1e9, 0, args.patience, args.seed, ladder=False, kinds=kinds)
    healed = await run_faults(args.faults, server, small, Load(plan, facts, tally))
    for each in healed:
        within = each.ready_seconds <= args.ready_within and each.unended == 0
        findings.append(Finding(each.fault, within and not each.trouble, each.said))
    for finding in findings:
        show(finding)
    return Report(findings, left_out, tally, healed)


async def read_facts(url: str, args: argparse.Namespace) -> Facts:
    """The served model's name, sizes and some of its token ids. Raises LoadError."""
    model = args.served_model or await asyncio.to_thread(find_model, url, args.api_key)
    wire, draw = Wire(url, args.api_key), random.Random(args.seed)
    text = " ".join(str(draw.randrange(10_000)) for _ in range(50)) + " the quick brown fox jumps over it"
    try:
        found = expect(await wire.ask("POST", "/tokenize", {"model": model, "prompt": text}))
    except (Wrong, Full, *GONE) as error:
        raise LoadError(f"{url}/tokenize: {error}") from error
    finally:
        wire.leave()
    most = max(1, min(args.output_len, found["max_model_len"] // 2))
    longest = min(found["max_model_len"], args.input_len + most)
    return Facts(model, longest, tuple(dict.fromkeys(found["tokens"])), most, found["max_model_len"])


async def first_round(url: str, api_key: str, facts: Facts) -> tuple[Mapping[str, Kind], dict[str, str]]:
    """Each kind twice, before anything counts: those that the server takes, and its words about the others."""
    found, left_out = dict(KINDS), dict[str, str]()
    for name, kind in KINDS.items():
        for at in range(FIRST_ROUNDS):
            wire = Wire(url, api_key)
            try:
                await kind.run(Visit(wire, random.Random(at), facts, Tally(), lambda _: None))
            except (Wrong, Full, *GONE) as error:
                found.pop(name, None)
                left_out[name] = str(error)
            finally:
                wire.leave()
    return found, left_out


def show(finding: Finding) -> None:
    """Print one finding."""
    word = {True: "ok", False: "FAILED", None: "-"}[finding.held]
    print(f"{word:>6}  {finding.name:<14}{finding.said}", flush=True)


def as_json(report: Report) -> dict[str, Any]:
    """The report as `--json` keeps it."""
    tally = report.tally
    return {
        "passed": report.passed,
        "findings": [asdict(finding) for finding in report.findings],
        "left_out": report.left_out,
        "healed": [asdict(each) for each in report.healed],
        "requests": [{"kind": kind, "end": end, "count": count} for (kind, end), count in sorted(tally.ends.items())],
        "tokens": tally.tokens,
        "most_streams": tally.most_streams,
        "memory": [asdict(sample) for sample in tally.samples],
        "gap_p99_ms": [gaps.quantile(0.99) * 1e3 for gaps in tally.gaps],
        "own_late_p99_ms": [late.quantile(0.99) * 1e3 for late in tally.late],
    }


def flags() -> argparse.ArgumentParser:
    """The mode's flags."""
    parser = argparse.ArgumentParser(prog="stoker bench soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="", help="ORG/NAME, folder, .gguf file or shape:NAME to serve")
    parser.add_argument("--url", default="", help="a server that runs, in place of one to start")
    parser.add_argument("--pid", type=int, default=0, help="its first process, where it runs here, to see its memory")
    parser.add_argument("--served-model", default="", help="the model to ask for; the first one listed unless given")
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY", ""), metavar="KEY", help="better in OPENAI_API_KEY"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="time of the load")
    parser.add_argument("--requests", type=int, default=0, help="most requests; 0: as many as there is time for")
    parser.add_argument("--streams", type=int, default=64, help="most requests at a time")
    parser.add_argument("--input-len", type=int, default=1024, help="longest prompt, tokens")
    parser.add_argument("--output-len", type=int, default=128, help="longest answer, tokens")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds after which a request never ended")
    parser.add_argument("--growth", type=float, default=0.05, help="share by which memory may grow and count as flat")
    parser.add_argument("--growth-mib", type=float, default=32.0, help="MiB by which it may, where that is more")
    parser.add_argument("--drift", type=float, default=1.5, help="factor by which the P99 gap may grow")
    parser.add_argument("--differing", type=int, default=0, help="sampled texts that may differ from their lone runs")
    parser.add_argument(
        "--faults", type=lambda text: text.split(","), default=[], metavar="LIST", help=f"of {','.join(FAULTS)}"
    )
    parser.add_argument("--ready-within", type=float, default=60.0, help="seconds from a fault to ready again")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything that is drawn")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--plot", type=Path, help="draw memory and gaps over the load here (needs matplotlib)")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="flags of `stoker serve`; comes last")
    return parser
