#!/usr/bin/env python3
"""Interrupts runs of the scenarios half-way, and looks for what they leave: `python e2e/interrupted.py [MOMENT…]`.

    1. what is here before    3. at the moment, SIGINT or SIGTERM
    2. a run of one folder    4. what is here that was not, after the run's end

Invariants: a moment is recognized by what the run has made, not by a time; one run after the other; status 1 when any
left something or did not end as an interrupted run does.
Knows nothing of how a run clears up.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.cluster.layout import Layout
from e2e.cluster.remains import DOCKER_FOLDERS, NODE_FOLDERS
from e2e.run import LOCK

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = Layout()
SCENARIOS = "e2e/scenarios/cache"
_INTERRUPTED = 130
_MOMENT_SECONDS, _END_SECONDS = 900.0, 240.0
# Of the programs that a run starts. What runs below a folder of this repository counts too.
_PROGRAMS = ("containerd", "dockerd", "runc", "etcd", "kube", "coredns", "debootstrap", "stoker")
_SETTINGS = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")


def commands() -> Iterator[tuple[int, str]]:
    """(pid, command line) of every process but this one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended while we looked
                continue


def runs(words: str) -> bool:
    """Whether a process with these words in its command line is there."""
    return any(words in command for _, command in commands())


def started(name: str) -> bool:
    """Whether the node's state file names this process."""
    return LAYOUT.state.exists() and f'"{name}"' in LAYOUT.state.read_text()


MOMENTS: dict[str, Callable[[], bool]] = {
    "it begins": LOCK.exists,
    "an image is built": lambda: runs("docker build "),
    "images are saved": lambda: runs("docker save "),
    "the control plane starts": lambda: started("etcd"),
    "the kubelet starts": lambda: started("kubelet"),
    "images are imported": lambda: runs("images import "),
    "the chart is installed": lambda: runs("helm "),
    "a scenario runs": lambda: runs("stoker_runtime.engine"),
}


def traces() -> set[str]:
    """All that a run makes, in words."""
    folders = {*NODE_FOLDERS, *DOCKER_FOLDERS, str(LAYOUT.run), str(LAYOUT.docker_run), str(LAYOUT.data), str(LOCK)}
    found = {f"folder {name}" for name in folders if Path(name).exists()}
    found |= {f"mount {line.split()[1]}" for line in Path("/proc/mounts").read_text().splitlines()}
    found |= {f"device {path.name}" for path in Path("/sys/class/net").iterdir()}
    found |= {f"group {path}" for path in Path("/sys/fs/cgroup").glob("**/kubepods")}
    found |= {f"setting {name}={_read(Path('/proc/sys') / name)}" for name in _SETTINGS}
    if shutil.which("nft"):
        tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True).stdout
        found |= {f"firewall {line}" for line in tables.splitlines()}
    ours = [(pid, line) for pid, line in commands() if line.startswith(str(ROOT)) or _program(line) in _PROGRAMS]
    return found | {f"process {pid} {line[:120]}" for pid, line in ours}


def _program(line: str) -> str:
    """Which of the programs this is a command line of."""
    name = Path(line.split(" ", 1)[0]).name
    return next((program for program in _PROGRAMS if name.startswith(program)), "")


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def interrupt(moment: str, number: signal.Signals) -> tuple[float, str]:
    """Run, interrupt at the moment: seconds until the end, and what is wrong afterwards, "" for nothing."""
    before, deadline = traces(), time.monotonic() + _MOMENT_SECONDS
    command = [sys.executable, str(ROOT / "e2e" / "run.py"), SCENARIOS]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        while not MOMENTS[moment]() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        process.send_signal(number)
        process.wait(_END_SECONDS)
        seconds = time.monotonic() - began
        output.seek(0)
        said = output.read().decode(errors="replace")[-1500:]
    if process.returncode != _INTERRUPTED:
        sys.stderr.write(f"{said}\n")
        return seconds, f"status {process.returncode}; the end of what it said stands above"
    return seconds, "; ".join(sorted(traces() - before))


def main() -> int:
    """Go through the moments, each with both signals, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("moments", nargs="*", metavar="MOMENT", help=f"of: {'; '.join(MOMENTS)} (default: all)")
    chosen = parser.parse_args().moments or list(MOMENTS)
    if unknown := [name for name in chosen if name not in MOMENTS]:
        parser.error(f"no moment {unknown[0]!r}; there are: {'; '.join(MOMENTS)}")
    wrong = 0
    print("| interrupted when | by | ended after, s | left |\n|---|---|---|---|", flush=True)
    for moment in chosen:
        for number in (signal.SIGINT, signal.SIGTERM):
            seconds, left = interrupt(moment, number)
            wrong += bool(left)
            print(f"| {moment} | {number.name} | {seconds:.0f} | {left or 'nothing'} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
