"""Threads follow what the process may use, by every way in which that is said."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from stoker_runtime.executor import processors
from stoker_runtime.executor.processors import BYTES_PER_THREAD, compute_threads, quota_processors

MUCH = BYTES_PER_THREAD * 1000


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "own", "processors"),
    [
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"cpu.max": "370000 100000\n"}, "0::/\n", 3.7),
        ({"a/cpu.max": "90000 30000\n", "a/b/cpu.max": "max 30000\n"}, "0::/a/b\n", 3.0),
        ({"a/cpu.max": "90000 30000\n", "a/b/cpu.max": "21000 30000\n"}, "0::/a/b\n", 0.7),
        # The host's path from inside of a container: the group itself is what is mounted.
        ({"cpu.max": "50000 20000\n"}, "0::/kubepods/pod7/abc\n", 2.5),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "170000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
         "3:cpuset:/x\n4:cpu,cpuacct:/pods/y\n", 1.7),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n", None),
        ({"cpu.max": "nonsense\n"}, "0::/\n", None),
        ({}, "0::/\n", None),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], own: str, processors: float | None) -> None:
    for name, text in files.items():
        write(tmp_path / "fs" / name, text)
    write(tmp_path / "own", own)
    assert quota_processors(tmp_path / "fs", tmp_path / "own") == processors


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_quota_of_any_group_around_counts(tmp_path: Path, version: int) -> None:
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    for case in range(40):
        root, names = tmp_path / str(case), [f"g{draw.randrange(9)}" for _ in range(draw.randrange(4))]
        base = root / "cpu,cpuacct" if version == 1 else root
        found: list[float] = []
        for depth in range(len(names) + 1):
            folder, period = base.joinpath(*names[:depth]), draw.randint(1000, 200_000)
            quota = draw.choice((None, draw.randint(1000, 9_000_000)))
            found += [] if quota is None else [quota / period]
            if version == 1:
                write(folder / "cpu.cfs_quota_us", f"{-1 if quota is None else quota}\n")
                write(folder / "cpu.cfs_period_us", f"{period}\n")
            else:
                write(folder / "cpu.max", f"{'max' if quota is None else quota} {period}\n")
        own = f"3:memory:/x\n7:cpu,cpuacct:/{'/'.join(names)}\n" if version == 1 else f"0::/{'/'.join(names)}\n"
        write(root / "own", own)
        assert quota_processors(root, root / "own") == min(found, default=None), seed


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    for _ in range(50):
        affinity, quota, variable = draw.randint(1, 40), draw.uniform(0.2, 40), draw.randint(1, 40)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=affinity: set(range(n)))
        monkeypatch.setattr(processors, "quota_processors", lambda q=quota: q)
        monkeypatch.setenv("OMP_NUM_THREADS", str(variable))
        assert compute_threads(0, MUCH) == max(1, min(affinity, int(quota), variable))
        assert compute_threads(0, int(BYTES_PER_THREAD * 1.5)) == 1
        assert compute_threads(23, 0) == 23
