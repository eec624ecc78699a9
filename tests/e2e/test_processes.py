"""e2e/cluster/processes.py: what was started is found, stopped and restarted by another object, and nobody else is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.cluster.processes import Processes, StartError, uninterrupted

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def test_another_object_stops_what_this_one_started(state: Path, tmp_path: Path) -> None:
    Processes(state, tmp_path).start("sleeper", SLEEP)
    other = Processes(state, tmp_path)
    assert other.alive("sleeper")
    with pytest.raises(StartError, match="already running"):
        other.start("sleeper", SLEEP)
    other.stop_all()
    assert not other.alive("sleeper")
    assert not state.exists()


def test_a_restart_uses_the_same_command(state: Path, tmp_path: Path) -> None:
    processes = Processes(state, tmp_path)
    processes.start("sleeper", SLEEP)
    before = json.loads(state.read_text())["sleeper"]["pid"]
    processes.restart("sleeper")
    after = json.loads(state.read_text())["sleeper"]
    try:
        assert after["pid"] != before
        assert after["command"] == SLEEP
        assert processes.alive("sleeper")
    finally:
        processes.stop_all()


def test_a_pid_that_another_program_got_is_left_alone(state: Path, tmp_path: Path) -> None:
    entry = {"command": ["mine"], "log": "", "pid": os.getpid(), "born": "1"}
    state.write_text(json.dumps({"mine": entry}))
    processes = Processes(state, tmp_path)
    assert not processes.alive("mine")
    processes.stop("mine", kill=True)


def test_one_that_ignores_sigterm_is_killed(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("e2e.cluster.processes._STOP_SECONDS", 0.3)
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    processes = Processes(state, tmp_path)
    processes.start("stubborn", [sys.executable, "-c", script])
    processes.wait("stubborn", lambda: "up" in processes.tail("stubborn"), 20)
    processes.stop("stubborn")
    assert not processes.alive("stubborn")


def test_an_end_during_start_shows_the_log(state: Path, tmp_path: Path) -> None:
    processes = Processes(state, tmp_path)
    processes.start("broken", [sys.executable, "-c", "raise SystemExit('no such flag')"])
    with pytest.raises(StartError, match="no such flag"):
        processes.wait("broken", lambda: False, 20)
    processes.stop_all()


def test_a_signal_waits_for_the_end_of_what_must_be_finished() -> None:
    """Of all that is nested; and what is run within is spared too. It is late, not lost."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("after"))
    try:
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGTERM)
                script = "import signal; print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
                child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
                assert child.stdout.strip() == "True"
            assert not seen
        assert seen == ["after"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["after", "after"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_was_owned_by_a_process_that_is_gone_is_not(state: Path, tmp_path: Path) -> None:
    processes = Processes(state, tmp_path)
    assert not processes.owned()
    processes.own()
    assert Processes(state, tmp_path).owned()
    script = "import sys, pathlib; from e2e.cluster.processes import Processes; state = pathlib.Path(sys.argv[1]);"
    command = [sys.executable, "-c", f"{script} Processes(state, state.parent).own()", str(state)]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[2])
    assert not processes.owned()
    processes.own()
    processes.stop_all()
    assert not processes.owned()
