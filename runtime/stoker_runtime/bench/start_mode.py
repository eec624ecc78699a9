"""`stoker bench start`: from starting `stoker serve` to its first token, twice, and the host memory of the server.

The first start finds an empty Triton cache, the second what the first has left. A shape is written as a checkpoint
first, so that weights are read from files; the page cache is left as it is.

Invariants: time counts from before the process is made to the end of the answer's body; memory is read after that
answer. The server is ended, whatever happens.
Knows nothing of how the server works: it reads its port, its answers, its log and /proc.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker_runtime.bench.checkpoints import FORMATS, write_checkpoint
from stoker_runtime.bench.peers import Figures, peers_on
from stoker_runtime.errors import ConfigError, StokerError
from stoker_runtime.fetch.by_name import locate

PATIENCE_SECONDS = 600.0
POLL_SECONDS = 0.005
GOODBYE_SECONDS = 30.0
PROMPT = list(range(1, 9))
MODEL_NAME = "bench"
FIRST, AGAIN = "first", "again"
TOLD = re.compile(r"start: |ready in |kernels?: |memory: |weights: |build: device: ")
DEVICE = re.compile(r"build: device: (.+)")


class StartFailed(Exception):
    """The server ended, or answered with something else than a completion; holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory of the server's processes in MiB: resident pages as each sees them, and shared pages shared out."""

    rss: float
    pss: float


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds to the first answered token, the server's memory, what its log says, and its device."""

    name: str
    seconds: float
    memory: Memory
    log: tuple[str, ...]
    device: str


def main(argv: list[str]) -> int:
    """Run `stoker bench start`; 1 when the server does not start, 2 for flags that cannot work."""
    args = flags().parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="stoker-start-") as folder, model_of(args, Path(folder)) as model:
            cache = Path(folder) / "triton"
            starts = [measure(name, [model, *args.serve], cache) for name in (FIRST, AGAIN)]
    except ConfigError as error:
        sys.stderr.write(f"stoker bench start: {error.message}\n")
        return 2
    except (StartFailed, StokerError) as error:
        sys.stderr.write(f"stoker bench start: {error}\n")
        return 1
    for start in starts:
        print(f"# {start.name}", *start.log, sep="\n  ")
    for line in table(starts):
        print(line)
    if args.json:
        args.json.write_text(json.dumps([asdict(start) for start in starts], indent=1))
    return 0


def flags() -> argparse.ArgumentParser:
    """The mode's flags."""
    parser = argparse.ArgumentParser(prog="stoker bench start", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default="", help="ORG/NAME of the hub, a folder or .gguf file")
    parser.add_argument("--revision", default="", help="branch, tag or commit of a model of the hub")
    parser.add_argument("--shape", default="", help="write a random checkpoint of this shape and start that")
    parser.add_argument("--checkpoint", default="bf16", choices=FORMATS, help="how to write it (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write it, and leave it (default: a temporary folder)")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="flags of `stoker serve`; comes last")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


@contextmanager
def model_of(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The model to start: the one named, or the written shape. Raises ConfigError for neither or both."""
    if bool(args.model) == bool(args.shape):
        raise ConfigError("Name a model folder or .gguf file, or --shape NAME: exactly one of them.", param="model")
    if args.model:
        # Fetched before the clock starts.
        yield locate(args.model, args.revision, say=lambda text: print(f"# {text}", flush=True))
        return
    target = args.folder or folder / Path(args.shape).name
    if not any((target / name).exists() for name in ("model.safetensors", "model.gguf")):
        began = time.perf_counter()
        try:
            size = write_checkpoint(args.shape, target, args.checkpoint)
        except ValueError as error:
            raise ConfigError(f"--checkpoint {args.checkpoint}: {error}", param="checkpoint") from error
        print(f"# wrote {size / 1e9:.1f} GB to {target} in {time.perf_counter() - began:.1f} s", flush=True)
    yield str(target)


def measure(name: str, arguments: list[str], triton_cache: Path) -> Start:
    """Start a server, wait for one token, read its memory, end it. Raises StartFailed."""
    port = free_port()
    command = [sys.executable, "-m", "stoker_cli", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(triton_cache)}
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--served-model-name", MODEL_NAME], stderr=log, stdout=log, env=environment
        )
        try:
            wait_for_token(process, port)
            seconds = time.perf_counter() - began
            memory = memory_of(process.pid)
        except StartFailed as error:
            raise StartFailed(f"{error}\n{''.join(lines_of(log)[-15:])}") from error
        finally:
            end(process)
        told = tuple(line.rstrip() for line in lines_of(log) if TOLD.search(line))
    devices = [found[1] for line in told if (found := DEVICE.search(line))]
    return Start(name, seconds, memory, told, devices[0] if devices else "")


def wait_for_token(process: subprocess.Popen[bytes], port: int) -> None:
    """Poll until the server is ready, then have one token generated. Raises StartFailed."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while request(port, "GET", "/ready") != 200:
        if process.poll() is not None:
            raise StartFailed(f"the server ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise StartFailed(f"the server was not ready after {PATIENCE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    status = request(port, "POST", "/v1/completions", body)
    if status != 200:
        raise StartFailed(f"the completion was answered with status {status}")


def request(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> int:
    """The status of one answer, its body read to the end; 0 where nothing listens yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    except ConnectionError:
        return 0
    finally:
        connection.close()
    return answer.status


def memory_of(root: int) -> Memory:
    """Memory of a process and all below it, from /proc; a process that has ended meanwhile counts nothing."""
    rss = pss = 0
    for pid in tree(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
        rss, pss = rss + int(kib["Rss"]), pss + int(kib["Pss"])
    return Memory(rss / 1024, pss / 1024)


def tree(root: int) -> Iterator[int]:
    """A process and its descendants."""
    yield root
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from tree(int(child))


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, then make it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GOODBYE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def lines_of(log: Any) -> list[str]:
    """What has been logged so far."""
    log.seek(0)
    lines: list[str] = log.readlines()
    return lines


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def table(starts: list[Start]) -> list[str]:
    """The figures beside vLLM's of a 7B model on the same device, one line a start."""
    lines = ["start   token s   vLLM  goal   RSS MiB   PSS MiB   vLLM  goal"]
    for start in starts:
        peers = peers_on(start.device).get("start/7b", {})
        peer, host, memory = peers.get(start.name, {}), peers.get("host", {}), start.memory
        lines.append(
            f"{start.name:<6}{start.seconds:>9.2f}{_peer(peer, 'vllm_s'):>7}{_peer(peer, 'goal_s'):>6}"
            f"{memory.rss:>10.0f}{memory.pss:>10.0f}{_peer(host, 'vllm_mib'):>7}{_peer(host, 'goal_mib'):>6}"
        )
    return lines


def _peer(figures: Figures, name: str) -> str:
    return f"{figures[name]:.0f}" if name in figures else "-"
