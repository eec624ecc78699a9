"""`stoker bench ranks`: how long a step takes from the leader to the other ranks' processes, on a processor alone.

Steps are batches as the scheduler makes them: decodes of the sequences of the step before, of others, and a prompt.
Readers are processes of their own, which sleep until a step comes, as ranks do; all clocks are the machine's one.
Every batch that was read is compared with what was written before anything is printed.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from stoker_runtime.errors import EngineError
from stoker_runtime.ranks.ring import Ring
from stoker_runtime.ranks.wire import STOP, Wire, command
from stoker_runtime.step.batch import Batch, PageUpdate, PrefillChunk

STEP_SECONDS = 0.002
"""Between two steps: the other ranks have done theirs and sleep."""
KINDS = ("same", "others", "prompt")


@dataclass(frozen=True, slots=True)
class Delay:
    """Of one kind of step, in microseconds: to make bytes of it, and until the last rank has a batch of these."""

    kind: str
    rows: int
    encode: float
    median: float
    p99: float


def steps(kind: str, rows: int, count: int) -> Iterator[Batch]:
    """So many batches of `rows` decodes; with "prompt" 2,048 tokens beside them."""
    for number in range(count):
        first = number % 2 if kind == "others" else 0
        decodes = tuple(range(first, first + rows))
        chunk = PrefillChunk(rows + 1, 0, tuple(range(number, number + 2048)), True)
        pages = PageUpdate(rows + 1, 0, tuple(range(number, number + 32)))
        beside = ((chunk,), (pages,)) if kind == "prompt" else ((), ())
        yield Batch(number, decodes, beside[0], (), beside[1])


def follow(descriptor: int, readers: int, reader: int) -> list[tuple[int, Batch]]:
    """What a rank reads until it shall stop: when it had each batch, in nanoseconds, and the batch."""
    ring, wire, found = Ring(descriptor, readers), Wire(), []
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    while isinstance(batch := wire.decode(ring.read(reader)), Batch):
        found.append((time.monotonic_ns(), batch))
    return found


def measure(readers: int, kind: str, rows: int, count: int) -> Delay:
    """Write `count` steps to so many processes. Raises EngineError where one read anything else."""
    ring = Ring.create(readers)
    program = [sys.executable, "-m", __spec__.name, "--follow", str(ring.descriptor), str(readers)]
    ranks = [
        subprocess.Popen([*program, str(number)], pass_fds=(ring.descriptor,), stdout=subprocess.PIPE)
        for number in range(readers)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.readline()
    wire, written, encoded = Wire(), [], []
    for batch in steps(kind, rows, count):
        time.sleep(STEP_SECONDS)
        begun = time.monotonic_ns()
        message = wire.encode(batch)
        encoded.append(time.monotonic_ns() - begun)
        ring.write(message, _nobody_stalls)
        written.append((begun, batch))
    ring.write(command(STOP), _nobody_stalls)
    read: list[list[tuple[int, Batch]]] = [pickle.loads(rank.communicate()[0]) for rank in ranks]
    ring.close()
    if any([batch for _, batch in each] != [batch for _, batch in written] for each in read):
        raise EngineError("A rank read other steps than were written.")
    last = [max(each[at][0] for each in read) - begun for at, (begun, _) in enumerate(written)]
    last = sorted(last[len(last) // 10 :])  # processes are new at first
    return Delay(
        kind, rows, statistics.median(encoded) / 1e3, statistics.median(last) / 1e3,
        last[int(0.99 * (len(last) - 1))] / 1e3,
    )  # fmt: skip


def _nobody_stalls() -> None:
    """Readers take what there is."""


def main(argv: list[str]) -> int:
    """Measure and print a table; the exit status."""
    if argv[:1] == ["--follow"]:
        sys.stdout.buffer.write(pickle.dumps(follow(*map(int, argv[1:]))))
        return 0
    parser = argparse.ArgumentParser(prog="stoker bench ranks", description="How long a step takes to reach all ranks.")
    parser.add_argument("--readers", default="1,3,7", help="ranks beside the leader, comma-separated")
    parser.add_argument("--rows", default="1,64,256", help="decodes of a step, comma-separated")
    parser.add_argument("--steps", type=int, default=500, help="steps of each kind")
    options = parser.parse_args(argv)
    print(f"{os.cpu_count()} processors; microseconds from the leader's batch to the last rank's, median and p99")
    print(f"{'ranks':>5} {'decodes':>7} {'step':>7} {'encode':>7} {'there':>7} {'p99':>7}")
    for readers in map(int, options.readers.split(",")):
        for rows in map(int, options.rows.split(",")):
            for kind in KINDS:
                each = measure(readers, kind, rows, options.steps)
                times = f"{each.encode:>7.0f} {each.median:>7.0f} {each.p99:>7.0f}"
                print(f"{1 + readers:>5} {rows:>7} {kind:>7} {times}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
