"""The emulator refuses what the hardware would hang or corrupt memory on."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.emulator.build import compile_emulated

CALL = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).run_fault(int(sys.argv[2]))"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emulator")
    compile_emulated((), "faults.cpp", folder)
    return folder / "kernels.so"


def run(library: Path, rule: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-c", CALL, str(library), str(rule)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_kernel_that_keeps_the_rules_ends(library: Path) -> None:
    assert run(library, 0).returncode == 0


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (1, "waits for ever"),
        (2, "waits for ever"),
        (3, "waits for ever"),
        (4, "has not started|not initialised"),
        (5, "ended"),
        (6, "waits for ever"),
        (7, "without an arrival"),
        (8, "not initialised"),
        (9, "waits for ever"),
        (10, "overwritten"),
        (11, "outside a cluster"),
    ],
)
def test_a_broken_rule_is_named(library: Path, rule: int, says: str) -> None:
    done = run(library, rule)
    assert done.returncode == -signal.SIGABRT
    assert re.search(says, done.stderr)
