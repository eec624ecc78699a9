"""e2e/run.py: ends in time, takes what it started along, and says by name why it did not run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from e2e import run
from e2e.cluster import backend, probe
from e2e.cluster.layout import NO_CLUSTER
from e2e.cluster.processes import NodeStartError, StartError
from e2e.scenarios import conftest


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of this test's own, no cluster of the user's, and whatever runs on this machine is left alone."""
    monkeypatch.setattr(run, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(backend, "clear", lambda: None)
    monkeypatch.setattr(run.Node, "running", lambda node: False)
    monkeypatch.setattr(backend, "takes_kind", lambda docker: False)
    for name in ("KUBECONFIG", "STOKER_E2E_IMAGES", "STOKER_E2E_UNTIL"):
        monkeypatch.setenv(name, "")  # so that what a run sets is gone after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("STOKER_E2E_LEND", "")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return run.main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("arguments", "status"), [(["ci"], 1), (["ci", "--minutes=30"], 0)])
def test_a_machine_that_cannot_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    monkeypatch.setattr(probe, "lacks", lambda: ["namespaces (not permitted)", "memory"])
    assert call(monkeypatch, *arguments) == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("this machine cannot carry a node; it lacks namespaces (not permitted); memory")
    assert ("skipped" in line) == (status == 0)


def test_too_little_time_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "ci", "--minutes=5") == 0
    assert "5 minutes are left" in capsys.readouterr().err


def test_a_machine_that_makes_no_cluster_passes_where_time_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "prepare", lambda clock: None)
    monkeypatch.setattr(run, "finish", lambda *_: NO_CLUSTER)
    assert call(monkeypatch, "ci", "--minutes=30") == 0
    assert "this machine made no cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "with_an_end", "status"),
    [(NodeStartError, False, None), (NodeStartError, True, 77), (StartError, True, None)],
)
def test_scenarios_end_where_no_node_comes_up(
    monkeypatch: pytest.MonkeyPatch, error: type[StartError], with_an_end: bool, status: int | None
) -> None:
    @contextmanager
    def broken(say: object) -> Iterator[backend.Given]:
        raise error("etcd ended")
        yield

    monkeypatch.setattr(conftest, "cluster", broken)
    if with_an_end:
        monkeypatch.setenv("STOKER_E2E_UNTIL", "inf")
    with ExitStack() as stack, pytest.raises((StartError, pytest.exit.Exception), match="etcd ended") as raised:
        conftest.entered(stack, lambda text: None)
    assert getattr(raised.value, "returncode", None) == status


def test_kubeconfig_without_images_says_what_to_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config").touch()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert call(monkeypatch) == 1
    assert "STOKER_E2E_IMAGES=OPERATOR,RUNTIME,HUB" in capsys.readouterr().err


def test_a_second_run_is_told_of_the_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with run.alone():
        assert call(monkeypatch) == 1
    assert "another run" in capsys.readouterr().err
    assert not run.LOCK.exists()


def test_a_command_is_ended_with_its_children_after_its_time(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {note}; wait"
    assert run.finish(["sh", "-c", script], 1.0, signal.SIGTERM) is None
    child = int(note.read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


def test_the_status_of_a_command_is_kept() -> None:
    assert run.finish(["sh", "-c", "exit 7"], None, signal.SIGTERM) == 7


def test_an_interrupt_reaches_the_command_and_is_waited_for(tmp_path: Path) -> None:
    """As Ctrl-C does: the command clears up before the run ends."""
    cleared = tmp_path / "cleared"
    inner = (
        # Who runs in a shell's background begins with interrupts ignored.
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"try:\n    print('up', flush=True); time.sleep(600)\nfinally:\n    open({str(cleared)!r}, 'w')"
    )
    outer = (
        "import signal, sys\nfrom e2e import run\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        f"run.finish([sys.executable, '-c', {inner!r}], None, signal.SIGINT)"
    )
    root = Path(run.__file__).resolve().parents[1]
    process = subprocess.Popen([sys.executable, "-c", outer], cwd=root, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(root)})  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.terminate()
    process.communicate(timeout=120)
    assert cleared.exists()
