"""What docker's builds get of this machine's pip, and what an interrupted bootstrap leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.cluster import docker


def test_settings_of_pips_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\ncert = /etc/authorities.crt\nindex-url = https://index.example/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    assert docker._pip_settings()["cert"] == "/etc/authorities.crt"
    assert docker._pip_settings()["index-url"] == "https://index.example/simple"
    assert docker._pip_settings().get("trusted-host", "") == ""


def test_what_a_command_started_ends_with_an_interrupted_run(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {note}; wait"
    outer = (
        "import signal; from e2e.cluster import docker\n"
        f"signal.signal(signal.SIGTERM, signal.default_int_handler); docker._output(['sh', '-c', {script!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], cwd=docker.Layout().cache.parents[3],
                               stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 60
    while not (note.exists() and note.read_text().endswith("\n")):
        assert time.monotonic() < deadline, "the command did not start"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    child = Path(f"/proc/{note.read_text().strip()}/stat")
    while child.exists() and " Z " not in child.read_text():
        assert time.monotonic() < deadline, "the child outlived the run"
        time.sleep(0.05)


def test_a_commands_output_is_kept() -> None:
    assert docker._output(["sh", "-c", "echo out; echo err >&2; exit 3"]) == (3, "out\nerr\n")
