#!/usr/bin/env python3
"""Runs scenarios: sees whether there can be a cluster, builds its binaries, runs pytest, clears up. See e2e/README.md.

    python e2e/run.py                       # all scenarios
    python e2e/run.py e2e/scenarios/cache   # those of a folder
    python e2e/run.py ci                    # the short selection: the tests marked `ci`
    python e2e/run.py ci --minutes 25       # what fits; where there can be no cluster, says why and ends with status 0

    1. nobody else runs scenarios here    3. binaries are built
    2. this machine carries a node        4. scenarios; nothing stays, however they end

Invariants: one run a machine at a time; with --minutes it ends in that time; a red end means that a scenario failed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.cluster import backend, foreign, images, probe
from e2e.cluster.binaries import to_stderr as say
from e2e.cluster.debian import MissingCommand
from e2e.cluster.docker import Docker
from e2e.cluster.layout import NO_CLUSTER
from e2e.cluster.node import Node
from e2e.cluster.processes import StartError, uninterrupted

ROOT = Path(__file__).resolve().parents[1]
LOCK = Path("/run/lock" if Path("/run/lock").is_dir() else tempfile.gettempdir()) / "stoker-e2e"
SELECTION = "ci"
# What scenarios call themselves, whoever made the cluster.
TOOLS = ["kubectl", "helm", "kubeconform", "crane"]
# What the selection takes on two cores, with room for a slow hour.
_SCENARIO_MINUTES = 12.0
# Before the end, when no further scenario begins, and when one that still runs is interrupted.
_LAST_START_MINUTES, _INTERRUPT_MINUTES = 5.0, 2.0
_PATIENCE_SECONDS = 90.0


class Skipped(Exception):
    """There can be no run here; the message says what is missing."""


class Clock:
    """What is left of the time a run may take."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def seconds(self, *, before_end: float = 0.0) -> float | None:
        """Seconds until so many minutes before the end, at least 1; None where there is no end."""
        return None if self._end is None else max(1.0, self._end - time.monotonic() - 60 * before_end)


def prepare(clock: Clock) -> None:
    """Have all that scenarios need but the cluster. Raises Skipped."""
    left = clock.seconds()
    if left is not None and left < 60 * _SCENARIO_MINUTES:
        raise Skipped(f"{left / 60:.0f} minutes are left, and the scenarios may take {_SCENARIO_MINUTES:.0f}")
    try:
        config = foreign.kubeconfig()
        if config is not None:
            _prepare_foreign(config, clock)
        else:
            _prepare_machine(clock)
    except (StartError, MissingCommand) as error:
        raise Skipped(str(error)) from None


def _prepare_foreign(config: Path, clock: Clock) -> None:
    named = foreign.images()
    build_binaries(TOOLS, clock)
    foreign.check(config, named)


def _prepare_machine(clock: Clock) -> None:
    if Node().running():
        raise Skipped("a node is up on this machine: set KUBECONFIG to use it, or: python e2e/cluster/rig.py down")
    backend.clear()
    docker = Docker()
    if backend.takes_kind(docker):
        build_binaries(TOOLS, clock)
        return
    if missing := probe.lacks():
        raise Skipped(probe.refusal(missing))
    build_binaries(["--node"], clock)
    if images.lending():
        with docker.running():
            images.check_base(docker)


def build_binaries(names: list[str], clock: Clock) -> None:
    """Build what is missing, for as long as the scenarios still have their time. Raises Skipped, CalledProcessError."""
    seconds = clock.seconds(before_end=_SCENARIO_MINUTES)
    command = [sys.executable, str(ROOT / "e2e" / "cluster" / "rig.py"), "build", *names]
    status = finish(command, seconds, signal.SIGTERM, quiet=True)
    if status is None:
        raise Skipped(f"the cluster's binaries were not built in {seconds or 0:.0f} s; Go keeps what it compiled")
    if status:
        raise subprocess.CalledProcessError(status, command)


def run_scenarios(scenarios: Sequence[str], clock: Clock) -> int:
    """pytest's status, 1 where it had to be interrupted; whatever it left is removed. Raises Skipped."""
    chosen = ["-m", SELECTION, "e2e/scenarios"] if list(scenarios) == [SELECTION] else list(scenarios)
    last_start = clock.seconds(before_end=_LAST_START_MINUTES)
    if last_start is not None:
        os.environ["STOKER_E2E_UNTIL"] = str(time.time() + last_start)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-o",
        "timeout=1800",
        "--durations=0",
        "--durations-min=30",
        *chosen,
    ]
    try:
        status = finish(command, clock.seconds(before_end=_INTERRUPT_MINUTES), signal.SIGINT)
    finally:
        if foreign.kubeconfig() is None:
            backend.clear()
    if status is None:
        say("e2e: interrupted: the time of this run is over, and a scenario still ran")
        return 1
    if status == NO_CLUSTER:
        raise Skipped("this machine made no cluster; the reason stands above")
    return status


def finish(command: list[str], seconds: float | None, interrupt: signal.Signals, *, quiet: bool = False) -> int | None:
    """Run a command to its end and return its status; None when it was interrupted after so many seconds.

    It has a session of its own, so that Ctrl-C reaches it once, from here, with time to clear up.
    """
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL if quiet else None)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with uninterrupted():
            _end(process, interrupt)


def _end(process: subprocess.Popen[bytes], interrupt: signal.Signals) -> None:
    """Interrupt a process and all of its session; kill it when it does not end."""
    for number, patience in ((interrupt, _PATIENCE_SECONDS), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def alone() -> Iterator[None]:
    """Hold this machine's lock. Raises Skipped when another run has it."""
    with open(LOCK, "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Skipped("another run of the scenarios is under way on this machine") from None
        try:
            yield
        finally:
            LOCK.unlink(missing_ok=True)


def main() -> int:
    """Run scenarios; 0 also where --minutes lets a machine that cannot run them pass."""
    parser = argparse.ArgumentParser(description="Scenarios on a real cluster.", allow_abbrev=False)
    parser.add_argument("scenarios", nargs="*", default=["e2e/scenarios"], metavar="PATH", help="or `ci`")
    parser.add_argument("--minutes", type=float, help="for CI: end in this time, skip by name what cannot be run")
    options = parser.parse_args()
    # Also where the shell started this in the background, with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if options.minutes is not None:
        os.environ["STOKER_E2E_LEND"] = "1"
    clock = Clock(options.minutes)
    try:
        with alone():
            prepare(clock)
            return run_scenarios(options.scenarios, clock)
    except Skipped as reason:
        say(f"e2e: {'skipped: ' if options.minutes is not None else ''}{' '.join(str(reason).split())}")
        return 1 if options.minutes is None else 0
    except StartError as error:
        say(f"e2e: {error}")
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    except KeyboardInterrupt:
        say("e2e: interrupted; nothing is left behind")
        return 130


if __name__ == "__main__":
    sys.exit(main())
