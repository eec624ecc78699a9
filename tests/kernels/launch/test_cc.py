"""C kernels for CPUs: compiled whole or not at all, for a level that the processor has, and named by what they are."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_kernels.launch import cc

needs_compiler = pytest.mark.skipif(cc.refusal("cpu_blocks") is not None, reason=f"{cc.refusal('cpu_blocks')}")


@needs_compiler
def test_every_level_compiles_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "stoker_kernels.launch.cc", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if cc.level() == cc.NATIVE:
        pytest.skip("levels are those of x86-64")
    names = {cc.file_name(stem, level) for stem in cc.sources() for level in cc.LEVELS}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert ctypes.CDLL(str(tmp_path / cc.file_name("cpu_blocks", cc.level()))).stoker_block_product


def test_a_name_changes_with_the_source_and_the_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = cc.file_name("cpu_blocks", "x86-64-v3")
    assert first != cc.file_name("cpu_blocks", "x86-64-v4")
    other = tmp_path / "cpu_blocks.c"
    other.write_bytes(cc.sources()["cpu_blocks"].read_bytes() + b"\n")
    monkeypatch.setattr(cc, "sources", lambda: {"cpu_blocks": other})
    assert cc.file_name("cpu_blocks", "x86-64-v3") != first


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(cc.CcMissing, match="apt-get install gcc"):
        cc.compile_library("cpu_blocks", "x86-64-v3", tmp_path / "made")
    assert not (tmp_path / "made").exists()


@needs_compiler
def test_what_does_not_compile_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cpu_blocks.c"
    broken.write_text("int broken(")
    monkeypatch.setattr(cc, "sources", lambda: {"cpu_blocks": broken})
    folder = tmp_path / "made"
    with pytest.raises(cc.CcMissing, match="does not compile"):
        cc.compile_library("cpu_blocks", cc.NATIVE, folder)
    assert list(folder.iterdir()) == []
