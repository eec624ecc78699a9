"""node_cache/disk.py: the folder as fetches leave it, and as an ill-meaning pod might."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from stoker_operator.node_cache.disk import Disk

DIGEST = "sha256:" + "5e" * 32


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    made = Disk(tmp_path / "models", os.getgid())
    made.prepare()
    return made


def publish(folder: Path, digest: str, count: int) -> Path:
    copy = folder / digest.replace(":", "-")
    copy.mkdir()
    (copy / "weights").write_bytes(b"x" * count)
    (copy / "stoker-manifest.json").write_text(json.dumps({}))
    return copy


def test_what_takes_room_is_seen_and_given_up(disk: Disk, tmp_path: Path) -> None:
    folder = disk.open("team.1-2")
    assert folder.stat().st_mode & 0o7777 == 0o2770
    before = time.time()
    publish(folder, DIGEST, 1000)
    (folder / ".partial-ab").mkdir()
    (folder / ".partial-ab" / "half").write_bytes(b"y" * 300)
    unfinished = folder / ("sha256-" + "77" * 32)
    unfinished.mkdir()
    half, whole = sorted(disk.stored(), key=lambda item: item.bytes)
    assert (half.digest, half.bytes) == ("", 300)
    assert (whole.digest, whole.bytes, whole.folder) == (DIGEST, 1002, "team.1-2")
    assert disk.has("team.1-2", DIGEST)
    assert not disk.has("team.1-2", "sha256:" + "77" * 32)
    os.utime(folder / whole.name, (0, 0))
    disk.touch("team.1-2", DIGEST)
    assert max(disk.stored(), key=lambda item: item.bytes).used >= before - 5
    disk.remove(half)
    disk.remove(whole)
    assert disk.stored() == []
    assert [item.name for item in folder.iterdir()] == [unfinished.name]


def test_a_removal_that_was_cut_short_is_finished(disk: Disk, tmp_path: Path) -> None:
    folder = disk.open("a.1")
    copy = publish(folder, DIGEST, 10)
    copy.rename(folder / ".given-up-x")
    assert [(item.digest, item.name) for item in disk.stored()] == [("", ".given-up-x")]
    Disk(tmp_path / "models", os.getgid()).prepare()
    assert list(folder.iterdir()) == []


def test_links_lead_nowhere(disk: Disk, tmp_path: Path) -> None:
    folder, elsewhere = disk.open("a.1"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    real = publish(elsewhere, DIGEST, 10)
    (folder / real.name).symlink_to(real)
    (folder / ".partial-1").symlink_to(elsewhere)
    os.utime(real, (1, 1))
    assert disk.stored() == []
    assert not disk.has("a.1", DIGEST)
    disk.touch("a.1", DIGEST)
    assert real.stat().st_mtime == 1
