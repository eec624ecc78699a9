"""`.ci/run` with a `make` that only says what it was asked for: what ends a run, and what is said at its end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = [".venv/bin/python", ".venv/.dev", "lint", "control-plane", "test", "demo", "soak", "e2e"]
# Fails where FAILING names its target; the soak takes longer than the demo.
MAKE = """#!/bin/sh
shift
echo "made $*"
[ "$1" != soak ] || sleep 0.3
[ "$1" != "$FAILING" ]
"""


def run_with(failing: str, folder: Path) -> subprocess.CompletedProcess[str]:
    for name, text in {"bin/make": MAKE, "bin/chromium": "#!/bin/sh\n", ".venv/bin/python": "#!/bin/sh\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAILING": failing, "KUBECONFIG": "x"}
    return subprocess.run([folder / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)


def table(run: subprocess.CompletedProcess[str]) -> list[str]:
    """The stages of the table at the end, in its order; the last line is of all of them."""
    lines = run.stdout.partition("ci: seconds of each stage\n")[2].splitlines()
    names = [re.fullmatch(r" *\d+ s  (.+)", line) for line in lines]
    return [name[1] for name in names if name is not None]


def test_every_stage_is_in_the_table(tmp_path: Path) -> None:
    run = run_with("", tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ci: all passed" in run.stdout
    assert re.search(r"^made soak SOAK=--drift 1000 --seed \d+$", run.stdout, re.MULTILINE), run.stdout
    *stages, last = table(run)
    assert last == "in all"
    assert [name.split()[1] for name in stages if name.startswith("make ")] == STAGES


@pytest.mark.parametrize("failing", STAGES)
def test_what_fails_ends_the_run_and_is_named(failing: str, tmp_path: Path) -> None:
    run = run_with(failing, tmp_path)
    assert run.returncode != 0
    assert "all passed" not in run.stdout
    *_, failed, last = table(run)
    assert last == "in all"
    assert failed.startswith(f"make {failing}")
    assert failed.endswith("(failed)")
    made = re.findall(r"^made (\S+)", run.stdout, re.MULTILINE)
    assert made[:5] == STAGES[:5][: STAGES.index(failing) + 1][:5]
    assert ("soak" in made) == (failing in ("soak", "e2e")), "its log is shown when it ended"
