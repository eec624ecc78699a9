"""`stoker fetch` as a process: exit statuses, the termination message, progress over HTTP, signals, a full volume."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "stoker_cli", "fetch"]


def environment(**changes: str) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    paths = [str(ROOT / name) for name in ("cli", "runtime")]
    return {**base, "PYTHONPATH": os.pathsep.join(paths), "NO_PROXY": "127.0.0.1,localhost", **changes}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=60)


def test_success_leaves_the_result_the_operator_reads(hub: Any, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    dest = tmp_path / "models"
    flags = ["--uri", "hf://acme/tiny", "--dest", str(dest), "--termination-log", str(log)]
    done = run(*flags, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    result = json.loads(log.read_text())
    assert result["path"] == result["serve"] == result["digest"].replace(":", "-")
    assert done.stdout == f"{dest / result['serve']}\n"
    assert result["shape"] == {"layers": 2, "kvHeads": 2, "headDim": 16, "maxContext": 512}
    folder = str(dest / result["path"])
    checked = run(
        "--verify-only", "--path", folder, "--digest", result["digest"], "--full", "--termination-log", str(log)
    )
    assert checked.returncode == 0, checked.stderr
    assert json.loads(log.read_text())["digest"] == result["digest"]


def test_a_check_imports_nothing_that_only_a_fetch_needs() -> None:
    """Every pod checks its weights before its engine starts, also while requests are held for it."""
    code = "import stoker_runtime.fetch.cli, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert "stoker_runtime" in imported, done.stderr
    assert not imported & {"httpx", "aiohttp", "numpy", "torch", "rich", "pydantic"}
    assert "stoker_runtime.models" not in done.stdout


def test_a_branch_is_looked_up_and_nothing_is_fetched(hub: Any, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    flags = ["--resolve", "--uri", "hf://acme/tiny", "--endpoint", hub.url, "--termination-log", str(log)]
    done = run(*flags, "--dest", str(tmp_path / "models"))
    assert done.returncode == 0, done.stderr
    commit = hub.repositories["acme/tiny"]["main"].commit()
    assert done.stdout == f"{commit}\n"
    result = json.loads(log.read_text())
    assert (result["resolvedRevision"], result["digest"], result["path"]) == (commit, "", "")
    assert not (tmp_path / "models").exists()
    refused = run("--resolve", f"file://{tmp_path}")
    assert refused.returncode == 3
    assert "has no revision to look up" in refused.stderr


def test_failure_leaves_reason_and_message_and_never_the_token(hub: Any, tmp_path: Path) -> None:
    hub.token = "hf_right"
    log = tmp_path / "termination-log"
    flags = ["hf://acme/tiny", "--dest", str(tmp_path / "models"), "--endpoint", hub.url, "--termination-log", str(log)]
    done = run(*flags, HF_TOKEN="hf_wrong_secret")
    assert done.returncode == 3
    left = json.loads(log.read_text())
    assert left["reason"] == "TokenRejected"
    assert "hf_wrong_secret" not in log.read_text() + done.stderr + done.stdout


def test_statuses_tell_what_a_retry_can_help(hub: Any, tmp_path: Path) -> None:
    dest = ["--dest", str(tmp_path / "models")]
    assert run("hf://acme/tiny", *dest, "--endpoint", "http://127.0.0.1:9", "--retries", "1").returncode == 1
    assert run("hf://acme/tiny", *dest, "--endpoint", hub.url, "--revision", "v9").returncode == 3
    assert run("--verify-only", "--path", str(tmp_path)).returncode == 3
    wrong = run("hf://acme/tiny", "--verfy-only")
    assert wrong.returncode == 2
    assert "--verfy-only" in wrong.stderr


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env=environment())


def test_progress_is_served_while_it_downloads_and_sigterm_keeps_what_is_there(hub: Any, tmp_path: Path) -> None:
    hub.faults.bytes_per_second = 1_000_000
    log, dest = tmp_path / "log", tmp_path / "models"
    port = free_port()
    flags = ["hf://acme/tiny", "--endpoint", hub.url, "--dest", str(dest), "--termination-log", str(log)]
    with start(*flags, "--progress-port", str(port)) as process:
        state = poll(f"http://127.0.0.1:{port}/progress")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    assert state["bytesTotal"] == 4 * (1 << 20) + 34 + (dest.parent / "repo/config.json").stat().st_size + 18
    assert 0 < state["bytesDone"] < state["bytesTotal"]
    assert state["etaSeconds"] >= 1
    assert json.loads(log.read_text())["reason"] == "Interrupted"
    assert any(path.stat().st_size for path in dest.glob(".partial-*/*"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def poll(url: str) -> dict[str, int]:
    """The first answer that shows bytes moving."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                state: dict[str, int] = json.load(answer)
        except OSError:
            state = {}
        if state.get("bytesDone") and state.get("etaSeconds"):
            return state
        time.sleep(0.05)
    raise AssertionError("no progress was served")


def test_a_volume_too_small_is_refused_before_the_download(hub: Any, small_volume: Path) -> None:
    done = run("hf://acme/tiny", "--endpoint", hub.url, "--dest", str(small_volume))
    assert done.returncode == 3
    assert "VolumeFull" in done.stderr
    assert "3.0 MiB" in done.stderr
    assert not any("/resolve/" in entry["path"] for entry in hub.log)


def test_a_destination_that_cannot_be_written_is_named(hub: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run("hf://acme/tiny", "--endpoint", hub.url, "--dest", str(blocked / "models"))
    assert done.returncode == 1
    assert "FetchFailed" in done.stderr
    assert str(blocked) in done.stderr
