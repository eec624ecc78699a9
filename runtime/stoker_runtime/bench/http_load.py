"""`stoker bench http`: a closed-loop load of streamed completions on a running server.

Each of N clients sends its next request when the last one has ended. Prompts are distinct random token ids, made
before the clock starts; a warm-up round is not counted. req/s = requests / wall; tok/s = generated tokens / wall;
TTFT = request sent to first event with text; ITL = time between such events; TPOT = (last - first) / (tokens - 1).
Invariants: every stream is checked (its token count, its finish, its end) before a figure is reported; a wrong one
fails the run. An event may carry several tokens, or none that has text yet: `tok/event` says how many, and where it is
far from 1, ITL is not the time of a token. `client cpu` near 1 means that this program, not the server, was the limit.
Knows nothing of engines: it works with any OpenAI-compatible server that takes token ids and `ignore_eos`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from multiprocessing.connection import Connection as PipeEnd
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from stoker_runtime.bench.http_client import Connection, LoadError, Result

LEAST_TOKEN = 100
HEADINGS = (
    *("clients", "requests", "req/s", "tok/s", "TTFT p50", "p95", "ITL p50", "p95"),
    *("TPOT p50", "e2e p50", "p95", "tok/event", "client cpu"),
)
WIDTH = 11


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. Lengths in tokens."""

    url: str
    model: str
    vocab: int
    input_len: int
    output_len: int
    api_key: str = ""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of a round."""

    load: Load
    clients: int
    requests: int
    seed: int


@dataclass(frozen=True, slots=True)
class Row:
    """One measured round. Times in milliseconds, wall in seconds."""

    clients: int
    requests: int
    wall_s: float
    req_s: float
    tok_s: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float
    tpot_p50: float
    e2e_p50: float
    e2e_p95: float
    event_tokens: float
    client_cpu: float


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share `q` of `values` lies (nearest rank); 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def bodies(load: Load, count: int, seed: int) -> list[bytes]:
    """Request bodies with distinct random prompts."""
    draw = random.Random(seed)
    fixed = {
        "model": load.model,
        "max_tokens": load.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    low, high = min(LEAST_TOKEN, load.vocab // 2), load.vocab - 1
    prompts = ([draw.randint(low, high) for _ in range(load.input_len)] for _ in range(count))
    return [json.dumps({**fixed, "prompt": prompt}).encode() for prompt in prompts]


async def _clients(share: Share, work: list[bytes]) -> list[Result]:
    parts = urlsplit(share.load.url)
    headers = {"content-type": "application/json"}
    if share.load.api_key:
        headers["authorization"] = f"Bearer {share.load.api_key}"
    results: list[Result] = []

    async def client() -> None:
        connection = Connection(parts.hostname or "127.0.0.1", parts.port or 80, headers)
        try:
            while work:
                results.append(check(await connection.complete(work.pop()), share.load))
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(share.clients):
            group.create_task(client())
    return results


def check(result: Result, load: Load) -> Result:
    """The result, if it is what was asked for. Raises LoadError."""
    if result.tokens != load.output_len or result.prompt_tokens != load.input_len:
        raise LoadError(
            f"asked for {load.input_len} + {load.output_len} tokens, got {result.prompt_tokens} + {result.tokens}"
        )
    if result.finish != "length":
        raise LoadError(f"the stream finished with {result.finish!r}, not 'length'")
    return result


Measured = tuple[list[Result], float]


def _process(share: Share, warm_up: bool, pipe: PipeEnd) -> None:
    """One client process: warm up, say so, wait for the start, measure, send (results, CPU seconds) or a message."""
    try:
        if warm_up:
            asyncio.run(_clients(share, bodies(share.load, share.clients, share.seed + 1_000_003)))
        work = bodies(share.load, share.requests, share.seed)
        pipe.send(None)
        pipe.recv()
        began = time.process_time()
        results = asyncio.run(_clients(share, work))
        pipe.send((results, time.process_time() - began))
    except* (LoadError, OSError, asyncio.IncompleteReadError) as group:
        pipe.send(f"{group.exceptions[0]}")


def measure(load: Load, clients: int, requests: int, processes: int, warm_up: bool) -> Row:
    """One round. Raises LoadError with the first thing that went wrong."""
    processes = min(processes, clients)
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for at in range(processes):
        ours, theirs = context.Pipe()
        mine = [total // processes + (at < total % processes) for total in (clients, requests)]
        share = Share(load, mine[0], mine[1], load.seed * 7919 + clients * 104_729 + at)
        workers.append(context.Process(target=_process, args=(share, warm_up, theirs), daemon=True))
        pipes.append(ours)
        workers[-1].start()
        theirs.close()
    try:
        for pipe in pipes:
            _receive(pipe)
        for pipe in pipes:
            pipe.send(None)
        measured = [found for pipe in pipes if (found := _receive(pipe)) is not None]
    except LoadError:
        for worker in workers:
            worker.kill()
        raise
    finally:
        for worker in workers:
            worker.join()
    return summarize(measured, clients)


def _receive(pipe: PipeEnd) -> Measured | None:
    try:
        received = pipe.recv()
    except EOFError:
        raise LoadError("a client process died") from None
    if isinstance(received, str):
        raise LoadError(received)
    found: Measured | None = received
    return found


def summarize(measured: Sequence[Measured], clients: int) -> Row:
    """The figures of a round."""
    results = [result for found, _ in measured for result in found]
    wall = max(r.ended for r in results) - min(r.started for r in results)
    spoken = [r for r in results if r.arrivals]
    first = [(r.arrivals[0] - r.started) * 1e3 for r in spoken]
    gaps = [(b - a) * 1e3 for r in results for a, b in zip(r.arrivals, r.arrivals[1:], strict=False)]
    per_token = [(r.arrivals[-1] - r.arrivals[0]) * 1e3 / (r.tokens - 1) for r in spoken if r.tokens > 1]
    whole = [(r.ended - r.started) * 1e3 for r in results]
    return Row(
        clients=clients,
        requests=len(results),
        wall_s=wall,
        req_s=len(results) / wall,
        tok_s=sum(r.tokens for r in results) / wall,
        ttft_p50=quantile(first, 0.5),
        ttft_p95=quantile(first, 0.95),
        itl_p50=quantile(gaps, 0.5),
        itl_p95=quantile(gaps, 0.95),
        tpot_p50=quantile(per_token, 0.5),
        e2e_p50=quantile(whole, 0.5),
        e2e_p95=quantile(whole, 0.95),
        event_tokens=sum(r.tokens for r in results) / max(1, sum(len(r.arrivals) for r in results)),
        client_cpu=max(cpu for _, cpu in measured) / wall,
    )


def line(row: Row) -> str:
    """A row of the table."""
    clients, requests, _, *figures = astuple(row)
    return "".join(f"{cell:>{WIDTH}}" for cell in (clients, requests, *(f"{figure:,.1f}" for figure in figures)))


def find_model(url: str, api_key: str) -> str:
    """The first model that the server lists. Raises LoadError."""
    request = Request(f"{url}/v1/models", headers={"authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urlopen(request, timeout=10) as response:
            return str(json.load(response)["data"][0]["id"])
    except HTTPError as error:
        hint = "; give the key with OPENAI_API_KEY" if error.code == 401 else ""
        raise LoadError(f"{url}/v1/models: status {error.code} {error.reason}{hint}") from error
    except URLError as error:
        raise LoadError(f"no server at {url}: {error.reason}; say where with --url") from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise LoadError(f"{url}/v1/models: {error}") from error


def main(argv: list[str]) -> int:
    """Run `stoker bench http` and return its exit status."""
    arguments = _parser().parse_args(argv)
    url = arguments.url.rstrip("/")
    rows: list[Row] = []
    try:
        model = arguments.model or find_model(url, arguments.api_key)
        load = Load(
            url, model, arguments.vocab, arguments.input_len, arguments.output_len, arguments.api_key, arguments.seed
        )
        sys.stdout.write(f"{model} at {url}: {load.input_len} tokens in, {load.output_len} out; times in ms\n")
        sys.stdout.write("".join(f"{heading:>{WIDTH}}" for heading in HEADINGS) + "\n")
        for clients in arguments.n:
            requests = arguments.requests or clients * arguments.rounds
            rows.append(measure(load, clients, requests, arguments.processes, not arguments.no_warm_up))
            sys.stdout.write(line(rows[-1]) + "\n")
            sys.stdout.flush()
    except LoadError as error:
        sys.stderr.write(f"stoker bench http: {error}\n")
        return 1
    if arguments.json:
        report = {"load": asdict(replace(load, api_key="")), "rows": [asdict(row) for row in rows]}
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,4,16")
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stoker bench http", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--model", default="", help="the model; the first one listed unless given")
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY", ""), metavar="KEY", help="better in OPENAI_API_KEY"
    )
    parser.add_argument("--n", type=_numbers, default=[1, 4, 16], metavar="1,4,16", help="numbers of clients")
    parser.add_argument(
        "--requests", type=int, default=0, help="requests of a round; clients times --rounds unless given"
    )
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate")
    parser.add_argument("--vocab", type=int, default=30_000, help="prompt ids are drawn below this (default: 30000)")
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--no-warm-up", action="store_true", help="skip the round that is not counted")
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures here")
    return parser
