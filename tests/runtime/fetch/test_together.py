"""Fetches of one model that begin together on one volume, each a process as a Job's pod runs it: the hub serves one
download, whoever comes second says that it waits, and goes on from what is there when the first one dies.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.runtime.fetch.test_cli import COMMAND, environment
from tests.runtime.fetch.test_prefetch import CHOSEN, SHARD, downloads, verify

WAITS = "Another fetch of the same model is running on this volume; waiting for it."
# Slow enough for all of them to have begun before the first is done; then the hub hurries.
HELD, UNHURRIED = 100_000, 1_500_000

Found = TypeVar("Found")


@dataclass
class Fetcher:
    """A process that fetches, and the file in which is what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def waits(self) -> bool:
        """Whether it has said so."""
        return WAITS in self.log.read_text()

    def finished(self) -> str:
        """What it said, once it has done well."""
        status = self.process.wait(120)
        assert status == 0, self.log.read_text()
        return self.log.read_text()


Begin = Callable[..., Fetcher]


@pytest.fixture
def begin(hub: Any, tmp_path: Path) -> Iterator[Begin]:
    """Start a fetch of the model onto the volume; what still runs at the end is ended."""
    begun: list[Fetcher] = []
    command = [*COMMAND, "--uri", "hf://acme/tiny", "--endpoint", hub.url, "--dest", str(tmp_path / "models")]

    def run(*more: str) -> Fetcher:
        log = tmp_path / f"fetch-{len(begun)}.log"
        with open(log, "wb") as stream:
            process = subprocess.Popen([*command, *more], stdout=stream, stderr=stream, env=environment())
        begun.append(Fetcher(process, log))
        return begun[-1]

    yield run
    for fetcher in begun:
        fetcher.process.kill()
        fetcher.process.wait()


def sent(hub: Any) -> int:
    """The bytes of files that the hub has served."""
    with hub.mutex:
        return sum(int(entry["sent"] or 0) for entry in hub.log)


def published(tmp_path: Path) -> Path:
    """The one folder that is there, of which nothing is left half done."""
    assert not list((tmp_path / "models").glob(".partial-*"))
    [folder] = (tmp_path / "models").glob("sha256-*")
    return folder


def until(what: str, look: Callable[[], Found]) -> Found:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not in time: {what}")


@pytest.mark.parametrize(
    "branches",
    [("main", "main"), ("main", "COMMIT"), ("COMMIT", "main"), ("main", "main", "COMMIT", "COMMIT")],
    ids=lambda branches: "-".join(branches),
)
def test_all_that_begin_at_one_moment_are_served_one_download(
    begin: Begin, hub: Any, model: Path, tmp_path: Path, branches: tuple[str, ...]
) -> None:
    """Whichever of them is the quickest, and whether a branch is named or the commit that it stands for."""
    hub.faults.bytes_per_second = HELD
    commit = hub.find("acme/tiny", "main").commit()
    fetchers = [begin("--revision", branch.replace("COMMIT", commit)) for branch in branches]
    until("all but one wait", lambda: sum(fetcher.waits for fetcher in fetchers) == len(fetchers) - 1)
    hub.faults.bytes_per_second = 0
    said = [fetcher.finished() for fetcher in fetchers]
    assert sum("already here and unchanged" in text for text in said) == len(fetchers) - 1
    assert sorted(downloads(hub)) == CHOSEN
    total = sum((model / name).stat().st_size for name in CHOSEN)
    # It counts an answer when it is over, a little after its last byte.
    assert until("the hub has counted", lambda: sent(hub) >= total)
    assert sent(hub) == total
    verify(published(tmp_path), full=True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_dies_leaves_what_it_has_to_the_one_that_waits(
    begin: Begin, hub: Any, model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    hub.faults.bytes_per_second = UNHURRIED
    first = begin()
    partial = until("the first has a part of the large shard", lambda: large_part(tmp_path))
    hub.faults.bytes_per_second = HELD
    seen, size = partial.stat().st_size, (model / SHARD).stat().st_size
    second = begin()
    until("the second waits", lambda: second.waits)
    assert downloads(hub).count(SHARD) == 1, "who waits asks for nothing"
    first.process.send_signal(how)
    first.process.wait(20)
    hub.faults.bytes_per_second = 0
    assert "already here" in second.finished()
    [_, again] = [entry for entry in hub.log if entry["path"].endswith(SHARD) and entry["method"] == "GET"]
    start_at = re.fullmatch(r"bytes=(\d+)-", again["range"])
    assert start_at
    assert seen <= int(start_at[1]) < size, "it goes on where the other stopped"
    assert int(until("the hub has counted", lambda: again["sent"])) == size - int(start_at[1])
    verify(published(tmp_path), full=True)


def large_part(tmp_path: Path) -> Path | None:
    """The partial file of the large shard, once it has more than all of the small one."""
    found = [path for path in (tmp_path / "models").glob(".partial-*/*") if path.stat().st_size > (5 << 18)]
    return next(iter(found), None)
