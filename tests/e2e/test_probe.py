"""e2e/cluster/probe.py: what is missing is named, and trying it leaves nothing behind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from e2e.cluster import probe
from e2e.cluster.layout import Layout

ALL = "cpuset cpu io memory pids\n"


def unified(root: Path, controllers: str = ALL, enabled: str = ALL) -> Path:
    (root / "cgroup.controllers").write_text(controllers)
    (root / "cgroup.subtree_control").write_text(enabled)
    return root


def test_only_root_may_make_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert probe.lacks(Layout(cache=tmp_path)) == ["root (this runs as user 1000)"]


def test_another_architecture_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.platform, "machine", lambda: "riscv64")
    [text] = probe.lacks()
    assert "x86_64" in text
    assert "riscv64" in text


@pytest.mark.parametrize("absent", ["cpu", "cpuset", "memory", "pids"])
def test_an_absent_controller_is_named(tmp_path: Path, absent: str) -> None:
    rest = [name for name in ALL.split() if name != absent]
    assert probe.cgroups(unified(tmp_path, " ".join(rest))) == [f"the cgroup controllers {absent}"]


def test_a_group_that_was_tried_is_gone(tmp_path: Path) -> None:
    before = sorted(unified(tmp_path).iterdir())
    assert probe.cgroups(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_hierarchy_of_version_1_that_is_missing_is_named(tmp_path: Path) -> None:
    for name in ("cpu", "cpuacct", "cpuset", "memory", "pids", "freezer"):
        (tmp_path / name).mkdir()
    [text] = probe.cgroups(tmp_path)
    assert "hierarchy devices" in text


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert probe.taken([port]) == [f"port {port} (another program listens there)"]
    assert probe.taken([port]) == []


def test_sizes_are_told_in_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "_MEMORY", 2**60)
    monkeypatch.setattr(probe, "_DISK", 10**18)
    memory, disk = probe.sizes(tmp_path / "not" / "there")
    assert "GiB are free" in memory
    assert f"are free at {tmp_path}" in disk
