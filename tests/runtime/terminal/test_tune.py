"""stoker_runtime/terminal/tune.py where there is no GPU: what it refuses, and that it writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_runtime.terminal.tune import main


def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_KERNEL_CACHE", str(tmp_path / "cache"))
    assert main(["shape:tiny", "--again", "--device", "cpu"]) == 2
    assert "of SM 9.0; there is none here" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_usage_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert "usage: stoker tune MODEL [--again]" in capsys.readouterr().out
    assert main(["shape:tiny", "--quantisation", "fp8"]) == 2
    assert "--quantization" in capsys.readouterr().err
