"""`stoker fetch --in-place`: weights that are hashed where they lie, and written to by nobody."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.fetch.cli import main


@pytest.fixture
def volume(model: Path, tmp_path: Path) -> Path:
    """A claim's volume, on which the model lies in a folder of its own."""
    root = tmp_path / "volume"
    shutil.move(model, root / "llama" / "7b")
    return root


def look(capsys: pytest.CaptureFixture[str], *arguments: str, log: Path) -> tuple[int, dict[str, Any], str]:
    """(exit status, termination message, stdout)."""
    status = main(["--in-place", "--termination-log", str(log), *arguments])
    return status, json.loads(log.read_text()), capsys.readouterr().out


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_it_reports_what_a_fetch_would_and_writes_nothing(
    volume: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, log = everything(volume), tmp_path / "log"
    status, report, out = look(capsys, f"file://{volume}/llama/7b", "--root", str(volume), log=log)
    assert status == 0
    assert (report["path"], report["serve"]) == ("llama/7b", "llama/7b")
    assert report["shape"] == {"layers": 2, "kvHeads": 2, "headDim": 16, "maxContext": 512}
    assert out == f"{volume}/llama/7b\n"
    assert everything(volume) == before
    assert main([f"file://{volume}/llama/7b", "--dest", str(tmp_path / "models"), "--termination-log", str(log)]) == 0
    copied = json.loads(log.read_text())
    assert {key: copied[key] for key in ("digest", "bytes", "resolvedRevision")} == {
        key: report[key] for key in ("digest", "bytes", "resolvedRevision")
    }


def test_the_root_itself_and_a_single_file(volume: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, log = volume / "llama" / "7b", tmp_path / "log"
    _, report, _ = look(capsys, f"file://{folder}", "--root", str(folder), log=log)
    assert (report["path"], report["serve"]) == ("", "")
    (volume / "m.gguf").write_bytes(b"weights")
    _, report, _ = look(capsys, f"file://{volume}/m.gguf", "--root", str(volume), log=log)
    assert (report["path"], report["serve"], report["bytes"]) == ("", "m.gguf", 7)


def test_changed_files_are_found(volume: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, uri = tmp_path / "log", f"file://{volume}/llama/7b"
    _, report, _ = look(capsys, uri, log=log)
    assert look(capsys, uri, "--digest", report["digest"], log=log)[0] == 0
    weights = volume / "llama" / "7b" / "model-00001-of-00002.safetensors"
    stat = weights.stat()
    weights.write_bytes(b"\0" + weights.read_bytes()[1:])
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    status, found, _ = look(capsys, uri, "--digest", report["digest"], log=log)
    assert (status, found["reason"]) == (3, "ChecksumMismatch")


def test_pins_and_globs_hold(volume: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, uri = tmp_path / "log", f"file://{volume}/llama/7b"
    status, found, _ = look(capsys, uri, "--sha256", f"tokenizer.json={'0' * 64}", log=log)
    assert (status, found["reason"]) == (1, "ChecksumMismatch")
    _, report, _ = look(capsys, uri, "--allow", "tokenizer.json", log=log)
    assert report["bytes"] == (volume / "llama" / "7b" / "tokenizer.json").stat().st_size


@pytest.mark.parametrize(
    ("uri", "reason"), [("hf://acme/tiny", "BadRequest"), ("file:///no/such/folder", "ModelNotFound")]
)
def test_what_does_not_lie_here_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], uri: str, reason: str
) -> None:
    status, found, _ = look(capsys, uri, log=tmp_path / "log")
    assert (status, found["reason"]) == (3, reason)


@pytest.mark.parametrize(
    "arguments",
    [
        ["file:///x", "--digest", "sha256:aa"],
        ["file:///x", "--root", "/x"],
        ["--verify-only", "--path", "/x", "--in-place"],
    ],
    ids=" ".join,
)
def test_flags_that_say_nothing_together(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err
